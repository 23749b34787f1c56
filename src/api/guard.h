// SPDX-License-Identifier: Apache-2.0
// What every exported function does around its work: it guards the handle, keeps exceptions inside, and keeps the text of a failure.
#pragma once

#include <exception>
#include <new>
#include <utility>

#include "api/context.h"
#include "core/status.h"

namespace fa::api {

// Text of the last failure of a call without a handle.
inline ErrorText &thread_error() {
  thread_local ErrorText error;
  return error;
}

// Runs `body` so that no exception leaves the library.
template <typename Body>
fa_status guarded(ErrorText &error, Body body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc &) {
    return fail(error, FA_ERROR_OUT_OF_MEMORY, "memory for the call's own bookkeeping could not be allocated");
  } catch (const std::exception &exception) {
    return fail(error, FA_ERROR_INTERNAL, "unexpected exception: %s", exception.what());
  } catch (...) {
    return fail(error, FA_ERROR_INTERNAL, "unexpected exception");
  }
}

// Runs `body` without a handle; its text is fa_last_error(NULL).
template <typename Body>
fa_status without_context(Body body) noexcept {
  ErrorText &error = thread_error();
  error.text[0] = '\0';
  return guarded(error, [&] { return body(error); });
}

// Runs `body` as the only user of a context; its text is fa_last_error(ctx).
template <typename Body>
fa_status with_context(fa_context ctx, Body body) noexcept {
  if (ctx == nullptr) return fail(thread_error(), FA_ERROR_INVALID_ARGUMENT, "ctx is NULL");
  if (ctx->magic != fa_context_s::kMagic) {
    return fail(thread_error(), FA_ERROR_INVALID_ARGUMENT, "ctx is %p, which is no context (destroyed already?)",
                static_cast<void *>(ctx));
  }
  if (ctx->busy.exchange(true, std::memory_order_acquire)) {
    return fail(thread_error(), FA_ERROR_BUSY,
                "ctx is %p, which is in use by another call; a context serves one call at a time", static_cast<void *>(ctx));
  }
  ctx->error.text[0] = '\0';
  const fa_status status = guarded(ctx->error, [&] { return body(*ctx, ctx->error); });
  if (ctx->score_in_use != nullptr) std::exchange(ctx->score_in_use, nullptr)->release();
  if (status != FA_OK && ctx->log != nullptr) ctx->log(ctx->log_user, FA_LOG_ERROR, ctx->error.text);
  ctx->busy.store(false, std::memory_order_release);
  return status;
}

}  // namespace fa::api
