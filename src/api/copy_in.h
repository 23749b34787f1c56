// SPDX-License-Identifier: Apache-2.0
// The only place that reads or writes the caller's versioned structs.
#pragma once

#include <cstddef>
#include <cstring>

#include "core/status.h"
#include "flashattn/flashattn.h"
#include "flashattn/flashattn_dist.h"

namespace fa::api {

// Sizes of the structs in 0.1.0, the first release. No caller has a smaller struct. These numbers do not change when structs grow.
template <typename Struct>
constexpr size_t kOldestSize = 0;
template <>
inline constexpr size_t kOldestSize<fa_config> = 56;
template <>
inline constexpr size_t kOldestSize<fa_device_properties> = 168;
template <>
inline constexpr size_t kOldestSize<fa_attention> = 1472;
template <>
inline constexpr size_t kOldestSize<fa_gradients> = 568;
template <>
inline constexpr size_t kOldestSize<fa_jvp> = 408;
template <>
inline constexpr size_t kOldestSize<fa_plan_info> = 424;
template <>
inline constexpr size_t kOldestSize<fa_append> = 1288;
template <>
inline constexpr size_t kOldestSize<fa_merge_problem> = 184;
template <>
inline constexpr size_t kOldestSize<fa_score_source> = 88;

template <>
inline constexpr size_t kOldestSize<fa_dist_problem> = 96;
template <>
inline constexpr size_t kOldestSize<fa_dist_layout_info> = 416;
template <>
inline constexpr size_t kOldestSize<fa_dist_transport> = 56;
template <>
inline constexpr size_t kOldestSize<fa_dist_config> = 24;
template <>
inline constexpr size_t kOldestSize<fa_dist_info> = 360;

// Larger sizes are refused: the field is not initialised.
constexpr size_t kLargestSize = 1 << 16;

// Whether `size` can be the size of a Struct in any version, past or future.
template <typename Struct>
bool plausible_size(size_t size) {
  static_assert(kOldestSize<Struct> >= sizeof(uint32_t) && kOldestSize<Struct> <= sizeof(Struct));
  return size >= kOldestSize<Struct> && size <= kLargestSize;
}

template <typename Struct>
fa_status init(Struct *target, const char *name, size_t size, ErrorText &error) {
  if (target == nullptr) return fail(error, FA_ERROR_INVALID_ARGUMENT, "%s is NULL", name);
  if (!plausible_size<Struct>(size)) {
    return fail(error, FA_ERROR_STRUCT_VERSION, "size of %s is %zu; it must be sizeof(*%s), %zu or more", name, size, name,
                kOldestSize<Struct>);
  }
  std::memset(target, 0, size);
  target->struct_size = static_cast<uint32_t>(size);
  return FA_OK;
}

// Copies a struct of any version into this version's struct. Fields that it lacks become zero. Fields unknown here must be zero.
template <typename Struct>
fa_status copy_in(const Struct *source, const char *name, Struct &copy, ErrorText &error) {
  if (source == nullptr) return fail(error, FA_ERROR_INVALID_ARGUMENT, "%s is NULL", name);
  uint32_t size = 0;
  std::memcpy(&size, source, sizeof size);
  if (!plausible_size<Struct>(size)) {
    return fail(error, FA_ERROR_STRUCT_VERSION, "%s->struct_size is %u; set it with the fa_*_init function (this version: %zu)",
                name, size, sizeof(Struct));
  }
  const auto *bytes = reinterpret_cast<const unsigned char *>(source);
  for (size_t i = sizeof(Struct); i < size; ++i) {
    if (bytes[i] != 0) {
      return fail(error, FA_ERROR_STRUCT_VERSION, "%s has a field newer than this library at byte %zu that is not zero", name,
                  i);
    }
  }
  copy = Struct{};
  std::memcpy(static_cast<void *>(&copy), source, size < sizeof(Struct) ? size : sizeof(Struct));
  return FA_OK;
}

// Checks the struct_size of an output struct.
template <typename Struct>
fa_status check_out(const Struct *target, const char *name, ErrorText &error) {
  if (target == nullptr) return fail(error, FA_ERROR_INVALID_ARGUMENT, "%s is NULL", name);
  if (!plausible_size<Struct>(target->struct_size)) {
    return fail(error, FA_ERROR_STRUCT_VERSION, "%s->struct_size is %u; set it with the fa_*_init function (this version: %zu)",
                name, target->struct_size, sizeof(Struct));
  }
  return FA_OK;
}

// Writes the fields that the caller's version has, and keeps its struct_size.
template <typename Struct>
void copy_out(const Struct &source, Struct *target) {
  const uint32_t size = target->struct_size;
  std::memcpy(static_cast<void *>(target), &source, size < sizeof(Struct) ? size : sizeof(Struct));
  target->struct_size = size;
}

}  // namespace fa::api
