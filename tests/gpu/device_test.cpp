// SPDX-License-Identifier: Apache-2.0
// The context reports the properties that CUDA reports.
#include <string>
#include <vector>

#include "gpu/device.h"

namespace gpu {
namespace {

using Device = OnGpu;

TEST_F(Device, IsTheOneOfCuda) {
  fa_device_properties device;
  fa_device_properties_init(&device, sizeof device);
  ASSERT_EQ(fa_device_info(context_, &device), FA_OK);
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device.device_index), "properties");
  EXPECT_EQ(device.device_type, FA_DEVICE_CUDA);
  EXPECT_EQ(device.compute_capability, properties.major * 10 + properties.minor);
  EXPECT_EQ(device.multiprocessors, properties.multiProcessorCount);
  EXPECT_EQ(device.memory_bytes, properties.totalGlobalMem);
  EXPECT_STREQ(device.name, properties.name);
}

// Queries refuse what the kernel of fa_merge cannot do, as the call does.
TEST_F(Device, TooManyPartsAreRefused) {
  const fa_tensor out{nullptr, {0, 4, 8}, {32, 8, 1}, FA_FLOAT32, 3}, lse{nullptr, {4, 0}, {1, 1}, FA_FLOAT32, 2};
  const std::vector<fa_tensor> outs(257, out), lses(257, lse);
  fa_merge_problem merge;
  fa_merge_problem_init(&merge, sizeof merge);
  merge.out_parts = outs.data();
  merge.lse_parts = lses.data();
  merge.out = out;
  fa_plan_info info;
  fa_plan_info_init(&info, sizeof info);
  for (const int32_t parts : {256, 257}) {
    merge.num_parts = parts;
    const fa_status expected = parts > 256 ? FA_ERROR_UNSUPPORTED : FA_OK;
    EXPECT_EQ(fa_merge_query(context_, &merge, &info), expected) << info.reason;
    EXPECT_EQ(info.status, expected);
    EXPECT_EQ(fa_merge_prepare(context_, &merge), expected) << fa_last_error(context_);
    EXPECT_EQ(fa_merge(context_, &merge, nullptr, 0, stream_), expected) << fa_last_error(context_);
    EXPECT_EQ(std::string(info.reason).find("num_parts is 257") == 0, parts > 256) << info.reason;
  }
}

}  // namespace
}  // namespace gpu
