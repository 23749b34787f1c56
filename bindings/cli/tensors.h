// SPDX-License-Identifier: Apache-2.0
// Data for a problem: made on the host from a seed, copied to the device, and read back.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "device.h"
#include "problem.h"

namespace cli {

// The bytes of one tensor of a problem: about normal numbers, or valid offsets, pages, blocks, slopes.
std::vector<char> host_data(const Spec &spec, const std::string &name, const fa_tensor &tensor, uint32_t seed);

// Memory for every tensor of a problem; inputs are filled, outputs are zero.
class Tensors {
 public:
  Tensors(Device &device, Problem &problem, uint32_t seed);

  // The content of an input. It is generated again, so that long tensors are not stored twice.
  std::vector<char> input(const Problem::Member &member) const;
  // The current content of an output.
  std::vector<char> output(const std::string &name) const;
  // The address of a tensor of `problem`, for another problem over the same memory.
  void *address(const std::string &name) const { return buffers_.at(name).data(); }

 private:
  Spec spec_;
  std::map<std::string, uint32_t> seeds_;
  std::map<std::string, Buffer> buffers_;
};

}  // namespace cli
