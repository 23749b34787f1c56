// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/device.h"

#include <algorithm>
#include <sstream>
#include <string>

namespace fa::cuda {

void restrict_to(int32_t cuda_arch, Device &device) {
  device.shared_bytes = std::min(device.shared_bytes, shared_bytes_of(cuda_arch));
  device.sm90 = device.sm90 && cuda_arch >= 90;
}

bool built_for(const char *archs, int32_t compute_capability) {
  std::istringstream words(archs);
  for (std::string word; words >> word;) {
    if (word.find_first_of("0123456789") != 0) return true;  // "native", "all"
    const int arch = std::stoi(word);
    const bool specific = word.find_first_of("af") != std::string::npos && word.find_first_of("af") < word.find('-');
    const bool machine_code = word.find("-virtual") == std::string::npos;
    const bool ptx = word.find("-real") == std::string::npos && !specific;
    if (machine_code &&
        (specific ? arch == compute_capability : arch / 10 == compute_capability / 10 && arch <= compute_capability)) {
      return true;
    }
    if (ptx && arch <= compute_capability) return true;
  }
  return false;
}

}  // namespace fa::cuda
