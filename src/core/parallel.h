// SPDX-License-Identifier: Apache-2.0
// The thread pool of CPU kernels: the context's own, or the caller's parallel_for.
#pragma once

#include <cstdint>

namespace fa {

class Parallel {
 public:
  using Task = void (*)(void *context, int32_t task);

  virtual ~Parallel() = default;

  // Largest number of tasks of a region, at least 1.
  virtual int32_t max_tasks() const = 0;

  // Calls task(context, t) once for every 0 <= t < num_tasks and returns when all have returned. Tasks may run one after another
  // on a single thread and in any order, so a task must never wait for a task with another index to *start*.
  // Returns false if a task was not run, because the caller's parallel_for is faulty.
  virtual bool run(int32_t num_tasks, Task task, void *context) = 0;

 protected:
  Parallel() = default;
};

}  // namespace fa
