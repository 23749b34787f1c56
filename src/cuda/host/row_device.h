// SPDX-License-Identifier: Apache-2.0
// Rows in device memory for context parallelism: kernels of kernels/rows, memory of a pool, and a second stream.
#pragma once

#include <memory>

#include "core/row_device.h"
#include "cuda/common/launch.h"
#include "cuda/host/driver.h"

namespace fa::cuda {

// What a RowDevice needs of the backend, whose calls it shares.
class StreamWork {
 public:
  // Makes the context of a stream current as long as `scope` lives.
  virtual fa_status enter(fa_stream stream, CurrentContext &scope, ErrorText &error) = 0;
  // The same, with the device's primary context.
  virtual fa_status enter_primary(CurrentContext &scope, ErrorText &error) = 0;
  // Between enter() and the end of its scope.
  virtual fa_status load(const Launches &launches, ErrorText &error) = 0;
  virtual fa_status enqueue(const Launches &launches, fa_stream stream, ErrorText &error) = 0;
  virtual fa_status allocate(size_t bytes, fa_stream stream, void *&memory, ErrorText &error) = 0;
  virtual fa_status check(CUresult result, const char *what, ErrorText &error) = 0;
  virtual const Driver &driver() const = 0;

 protected:
  ~StreamWork() = default;
};

fa_status make_row_device(StreamWork &work, std::unique_ptr<RowDevice> &device, ErrorText &error);

}  // namespace fa::cuda
