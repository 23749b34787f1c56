// SPDX-License-Identifier: Apache-2.0
// What context parallelism asks of a device besides attention: memory, work on rows, and a second stream for messages. On the
// CPU every call returns when its work is done. On CUDA calls enqueue, unless they say that they wait.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/problem.h"
#include "core/status.h"
#include "flashattn/flashattn_dist.h"

namespace fa {

class RowDevice {
 public:
  virtual ~RowDevice() = default;

  // Scratch memory for work on `stream`, aligned to kWorkspaceAlignment. It is released on the same stream.
  virtual fa_status allocate(size_t bytes, fa_stream stream, void *&memory, ErrorText &error) = 0;
  virtual void release(void *memory, fa_stream stream) = 0;

  // Loads what the calls below run, so that a stream capture of them is safe.
  virtual fa_status prepare(ErrorText &error) = 0;

  // to = from, of the same dtype.
  virtual fa_status copy(const RowShape &shape, const Operand &from, const Operand &to, fa_stream stream, ErrorText &error) = 0;
  // to = the sum of `parts`, at most kMostRowParts, in fp32 and in their order, rounded once to the dtype of `to`. Each part is
  // fp32 (rows, heads, dim). `to` may be one of them.
  virtual fa_status sum(const RowShape &shape, std::span<const float *const> parts, const Operand &to, fa_stream stream,
                        ErrorText &error) = 0;
  virtual fa_status zero(void *memory, size_t bytes, fa_stream stream, ErrorText &error) = 0;

  // sum += part, and to[n * stride] = the sum of parts[p * count + n] over p in ascending order. For the gradient of the sink.
  virtual fa_status add(double *sum, const float *part, int64_t count, fa_stream stream, ErrorText &error) = 0;
  virtual fa_status sum(const double *parts, int64_t num_parts, int64_t count, float *to, int64_t stride, fa_stream stream,
                        ErrorText &error) = 0;

  // Writes numbers of the host, which are read before the call returns.
  virtual fa_status write(std::span<const int64_t> numbers, int64_t *to, fa_stream stream, ErrorText &error) = 0;
  // Copies device memory to the host. Waits for it, at most `timeout_ms` milliseconds; then FA_ERROR_TRANSPORT.
  virtual fa_status read(void *to, const void *from, size_t bytes, int64_t timeout_ms, fa_stream stream, ErrorText &error) = 0;

  // A stream for work outside of the user's calls.
  virtual fa_stream own_stream() = 0;
  // A second stream: its later work follows all work that is in `stream` now.
  virtual fa_status fork(fa_stream stream, fa_stream &second, ErrorText &error) = 0;
  // Marks the work that is in the second stream now, by a number that counts up from 0.
  virtual fa_status mark(int64_t number, ErrorText &error) = 0;
  // Later work in `stream` follows the work of that mark, and perhaps of later ones.
  virtual fa_status join(int64_t number, fa_stream stream, ErrorText &error) = 0;
  // Whether the work of the last mark is done. From any thread. True while a capture records the second stream.
  virtual bool is_done() = 0;

 protected:
  RowDevice() = default;
};

}  // namespace fa
