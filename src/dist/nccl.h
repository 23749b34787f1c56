// SPDX-License-Identifier: Apache-2.0
// The functions of NCCL that the library calls, found in the copy of NCCL that made the caller's communicator. The library
// links no NCCL and never loads one: a communicator means nothing to another copy.
#pragma once

#include <cstddef>
#include <memory>

#include "core/status.h"

namespace fa::dist {

// Of nccl.h, as every NCCL 2 since 2.14 has them.
using NcclComm = void *;
using NcclResult = int;
constexpr NcclResult kNcclSuccess = 0, kNcclInProgress = 7;
constexpr int kNcclUint8 = 1;

// X(function, its parameters)
#define FA_NCCL_FUNCTIONS(X)                                                               \
  X(ncclCommAbort, (NcclComm comm))                                                        \
  X(ncclCommCount, (const NcclComm comm, int *count))                                      \
  X(ncclCommCuDevice, (const NcclComm comm, int *device))                                  \
  X(ncclCommGetAsyncError, (NcclComm comm, NcclResult * error))                            \
  X(ncclCommUserRank, (const NcclComm comm, int *rank))                                    \
  X(ncclGroupEnd, ())                                                                      \
  X(ncclGroupStart, ())                                                                    \
  X(ncclRecv, (void *data, size_t count, int type, int peer, NcclComm comm, void *stream)) \
  X(ncclSend, (const void *data, size_t count, int type, int peer, NcclComm comm, void *stream))

struct Nccl {
#define FA_MEMBER(name, parameters) NcclResult(*name) parameters = nullptr;
  FA_NCCL_FUNCTIONS(FA_MEMBER)
#undef FA_MEMBER
  const char *(*ncclGetErrorString)(NcclResult result) = nullptr;
  std::unique_ptr<void, int (*)(void *)> opened{nullptr, nullptr};  // keeps a library that find_nccl() opened
};

// `library`: a handle of dlopen(), or null: NCCL among the global symbols of the process, else a libnccl.so.2 that it has loaded.
fa_status find_nccl(void *library, Nccl &nccl, ErrorText &error);

}  // namespace fa::dist
