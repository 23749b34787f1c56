// SPDX-License-Identifier: Apache-2.0
// How CPU kernels ask for threads: the context's own pool or the host's callback, behind one interface.
#pragma once

#include <cstdint>

namespace fa {

class Parallel {
 public:
  using Task = void (*)(void *context, int32_t task);

  virtual ~Parallel() = default;

  // Tasks a region may have at most; >= 1.
  virtual int32_t max_tasks() const = 0;

  // Calls task(context, t) once for every 0 <= t < num_tasks and returns when all have returned. Tasks may run one after another
  // on a single thread and in any order, so a task must never wait for a task with another index to *start*.
  // Returns false if a task was not run (a faulty host callback).
  virtual bool run(int32_t num_tasks, Task task, void *context) = 0;

 protected:
  Parallel() = default;
};

}  // namespace fa
