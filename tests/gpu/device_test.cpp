// SPDX-License-Identifier: Apache-2.0
// The context tells what CUDA tells.
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

}  // namespace
}  // namespace gpu
