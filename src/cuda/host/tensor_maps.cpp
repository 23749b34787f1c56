// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/tensor_maps.h"

#include <algorithm>

#include "cuda/common/swizzle_atom.h"
#include "cuda/host/planners.h"

namespace fa::cuda {
namespace {

constexpr int kMaxRank = 5;

// Dimensions from the innermost outwards. The innermost one is contiguous; the strides are those of the others.
struct Description {
  CUtensorMapDataType type;
  int64_t element_bytes;
  int rank;
  int64_t sizes[kMaxRank];
  int64_t strides[kMaxRank - 1];  // in elements
  int32_t box[kMaxRank];
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
};

CUtensorMapDataType map_type(Dtype dtype) {
  return is_quantised(dtype)    ? CU_TENSOR_MAP_DATA_TYPE_UINT8
         : dtype == Dtype::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
         : dtype == Dtype::f32  ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

fa_status encode(const Driver &driver, const char *name, void *data, const Description &d, CUtensorMap &map, ErrorText &error) {
  cuuint64_t sizes[kMaxRank], strides[kMaxRank - 1];
  cuuint32_t box[kMaxRank], element_strides[kMaxRank];
  for (int n = 0; n < d.rank; ++n) {
    sizes[n] =
        static_cast<cuuint64_t>(std::max<int64_t>(d.sizes[n], 1));  // 0 is not allowed; of an empty tensor nothing is loaded
    if (n > 0) strides[n - 1] = static_cast<cuuint64_t>(d.strides[n - 1] * d.element_bytes);
    box[n] = static_cast<cuuint32_t>(d.box[n]);
    element_strides[n] = 1;
  }
  const CUresult result =
      driver.cuTensorMapEncodeTiled(&map, d.type, static_cast<cuuint32_t>(d.rank), data, sizes, strides, box, element_strides,
                                    CU_TENSOR_MAP_INTERLEAVE_NONE, d.swizzle, d.promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return FA_OK;
  return fail(error, FA_ERROR_CUDA, "%s at %p: the driver cannot make a tensor map for it (%s)", name, data,
              cudaGetErrorName(to_runtime(result)));
}

int64_t atom_columns(Dtype dtype) { return kAtomBytes / dtype_bytes(dtype); }

// (batches, heads, swizzle atoms, rows, columns of an atom), in boxes of `box_atoms` atoms. Rows that do not end with an atom are one atom of all
// columns, in boxes of one.
Description by_atoms(const Operand &t, int64_t head_dim, int64_t rows, int64_t heads, int64_t batches, int32_t box_atoms,
                     int32_t box_rows) {
  const int64_t columns = atom_columns(t.dtype);
  const bool whole = has_whole_atoms(t.dtype, head_dim);
  // What a box has beyond the columns is zero. With one atom its stride does not count, but has to be legal.
  return {.type = map_type(t.dtype),
          .element_bytes = dtype_bytes(t.dtype),
          .rank = 5,
          .sizes = {whole ? columns : head_dim, rows, whole ? head_dim / columns : 1, heads, batches},
          .strides = {t.seq_stride, columns, t.head_stride, t.batch_stride},
          .box = {static_cast<int32_t>(columns), box_rows, whole ? box_atoms : 1, 1, 1},
          .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B};
}

// The rows of K or V of one batch or page, and how many of these there are.
struct KvRows {
  int64_t count, batches;

  explicit KvRows(const Problem &p) {
    const bool paged = p.page_table != nullptr, packed = p.k_lengths.cu != nullptr;
    count = paged ? p.page_size : packed ? p.k_lengths.total : p.k_lengths.max_len;
    batches = paged ? p.num_pages : packed ? 1 : p.batch;
  }
};

}  // namespace

bool has_whole_atoms(Dtype dtype, int64_t head_dim) { return head_dim % atom_columns(dtype) == 0; }

fa_status describe_rows(const Driver &driver, const char *name, const Operand &t, const Lengths &lengths, int64_t batch,
                        int64_t heads, int64_t head_dim, int32_t box_atoms, int32_t box_rows, CUtensorMap &map,
                        ErrorText &error) {
  const bool packed = lengths.cu != nullptr;
  const int64_t rows = packed ? lengths.total : lengths.max_len, batches = packed ? 1 : batch;
  if (box_atoms > 1)
    return encode(driver, name, t.data, by_atoms(t, head_dim, rows, heads, batches, box_atoms, box_rows), map, error);
  const Description d{.type = map_type(t.dtype),
                      .element_bytes = dtype_bytes(t.dtype),
                      .rank = 4,
                      .sizes = {head_dim, rows, heads, batches},
                      .strides = {t.seq_stride, t.head_stride, t.batch_stride},
                      .box = {static_cast<int32_t>(atom_columns(t.dtype)), box_rows, 1, 1}};
  return encode(driver, name, t.data, d, map, error);
}

fa_status describe_kv(const Driver &driver, const char *name, const Problem &p, const Operand &t, int64_t head_dim,
                      int32_t box_columns, int32_t box_rows, CUtensorMap &map, ErrorText &error, bool swizzles_bytes) {
  const KvRows rows(p);
  Description d = by_atoms(t, head_dim, rows.count, p.heads_k, rows.batches,
                           box_columns / static_cast<int32_t>(atom_columns(t.dtype)), box_rows);
  if (is_quantised(t.dtype)) {
    d.sizes[0] = head_dim;
    d.sizes[2] = 1;
    d.strides[1] = d.box[0] = box_columns;
    d.box[2] = 1;
    if (!swizzles_bytes) d.swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
  }
  return encode(driver, name, t.data, d, map, error);
}

fa_status describe_wide_8bit(const Driver &driver, const char *name, const Problem &p, const Operand &t, int64_t head_dim,
                             int32_t box_columns, int32_t box_rows, bool swizzled, CUtensorMap &map, ErrorText &error) {
  const KvRows rows(p);
  const Description d{.type = map_type(t.dtype),
                      .element_bytes = 1,
                      .rank = 5,
                      .sizes = {kWideAtom, rows.count, head_dim / kWideAtom, p.heads_k, rows.batches},
                      .strides = {t.seq_stride, kWideAtom, t.head_stride, t.batch_stride},
                      .box = {kWideAtom, box_rows, box_columns / kWideAtom, 1, 1},
                      .swizzle = swizzled ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_NONE,
                      .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B};
  return encode(driver, name, t.data, d, map, error);
}

fa_status describe_head_rows(const Driver &driver, const char *name, const Operand &t, const Lengths &lengths, int64_t batch,
                             int64_t heads, int64_t head_dim, int32_t box_heads, int32_t box_rows, CUtensorMap &map,
                             ErrorText &error) {
  const bool packed = lengths.cu != nullptr;
  const int64_t bytes = dtype_bytes(t.dtype);
  const Description d{.type = map_type(t.dtype),
                      .element_bytes = bytes,
                      .rank = 4,
                      .sizes = {head_dim, heads, packed ? lengths.total : lengths.max_len, packed ? 1 : batch},
                      .strides = {t.head_stride, t.seq_stride, t.batch_stride},
                      .box = {static_cast<int32_t>(kAtomBytes / bytes), box_heads, box_rows, 1}};
  return encode(driver, name, t.data, d, map, error);
}

fa_status describe_pages(const Driver &driver, const char *name, const Problem &p, const Operand &t, int64_t head_dim,
                         int32_t box_columns, int32_t box_rows, CUtensorMap &map, ErrorText &error) {
  constexpr int64_t kGroupRows = 8;
  const int64_t bytes = dtype_bytes(t.dtype), atom = kAtomBytes / bytes;
  const PageDimension pages = page_dimension(p, t);
  const Description d{.type = map_type(t.dtype),
                      .element_bytes = bytes,
                      .rank = 5,
                      .sizes = {atom, kGroupRows, head_dim / atom, p.page_size / kGroupRows, pages.count},
                      .strides = {t.seq_stride, atom, kGroupRows * t.seq_stride, pages.stride},
                      .box = {static_cast<int32_t>(atom), static_cast<int32_t>(kGroupRows),
                              static_cast<int32_t>(box_columns / atom), static_cast<int32_t>(box_rows / kGroupRows), 1},
                      .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B};
  return encode(driver, name, t.data, d, map, error);
}

fa_status describe_bias(const Driver &driver, const char *name, const Problem &p, const ScoreTensor &t, CUtensorMap &map,
                        ErrorText &error) {
  const Description d{.type = map_type(t.dtype),
                      .element_bytes = dtype_bytes(t.dtype),
                      .rank = 4,
                      .sizes = {p.k_lengths.max_len, p.q_lengths.max_len, p.heads_q, p.batch},
                      .strides = {t.row_stride, t.head_stride, t.batch_stride},
                      .box = {static_cast<int32_t>(kAtomBytes / dtype_bytes(t.dtype)), 64, 1, 1}};
  return encode(driver, name, t.data, d, map, error);
}

fa_status describe_transposed_v(const Driver &driver, void *transposed_v, int64_t batch, int64_t heads, int64_t head_dim_v,
                                int64_t pitch, int32_t box_keys, int32_t box_columns, CUtensorMap &map, ErrorText &error) {
  const Description d{.type = CU_TENSOR_MAP_DATA_TYPE_UINT8,
                      .element_bytes = 1,
                      .rank = 4,
                      .sizes = {pitch, head_dim_v, heads, batch},
                      .strides = {pitch, pitch * head_dim_v, pitch * head_dim_v * heads},
                      .box = {box_keys, box_columns, 1, 1}};
  return encode(driver, "workspace for the transposed v", transposed_v, d, map, error);
}

fa_status describe_row_statistics(const Driver &driver, const char *name, float *data, int64_t tiles, int32_t rows,
                                  CUtensorMap &map, ErrorText &error) {
  const Description d{.type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                      .element_bytes = sizeof(float),
                      .rank = 4,
                      .sizes = {rows, tiles, 1, 1},
                      .strides = {rows, rows, rows},
                      .box = {rows, 1, 1, 1},
                      .swizzle = CU_TENSOR_MAP_SWIZZLE_NONE};
  return encode(driver, name, data, d, map, error);
}

}  // namespace fa::cuda
