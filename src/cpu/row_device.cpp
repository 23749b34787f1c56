// SPDX-License-Identifier: Apache-2.0
#include "cpu/row_device.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/own_workspace.h"

namespace fa::cpu {
namespace {

class HostRows final : public RowDevice {
 public:
  explicit HostRows(Backend &backend) : backend_(backend) {}

  fa_status allocate(size_t bytes, fa_stream, void *&memory, ErrorText &error) override {
    FA_RETURN_IF_ERROR(memory_.reserve(bytes, error));
    memory = memory_.data();
    return FA_OK;
  }
  void release(void *, fa_stream) override {}

  fa_status prepare(ErrorText &) override { return FA_OK; }

  fa_status copy(const RowShape &shape, const Operand &from, const Operand &to, fa_stream, ErrorText &) override {
    const int64_t bytes = dtype_bytes(from.dtype);
    const bool joined = from.head_stride == shape.dim && to.head_stride == shape.dim;  // the heads of a row are one block
    const int64_t blocks = joined ? 1 : shape.heads, block = (joined ? shape.heads : 1) * shape.dim * bytes;
    for (int64_t i = 0; i < shape.rows; ++i) {
      for (int64_t h = 0; h < blocks; ++h) {
        std::memcpy(static_cast<char *>(to.data) + (i * to.seq_stride + h * to.head_stride) * bytes,
                    static_cast<const char *>(from.data) + (i * from.seq_stride + h * from.head_stride) * bytes,
                    static_cast<size_t>(block));
      }
    }
    return FA_OK;
  }

  fa_status sum(const RowShape &shape, std::span<const float *const> parts, const Operand &to, fa_stream,
                ErrorText &error) override {
    const int64_t row = shape.heads * shape.dim;
    if (row == 0) return FA_OK;
    const int64_t step = std::max<int64_t>(1, 16384 / row);  // rows whose sums stay in a near cache
    sums_.resize(static_cast<size_t>(step * row));
    for (int64_t i = 0; i < shape.rows; i += step) {
      const int64_t rows = std::min(step, shape.rows - i), count = rows * row;
      std::copy_n(parts[0] + i * row, count, sums_.data());
      for (const float *part : parts.subspan(1)) {
        for (int64_t n = 0; n < count; ++n) sums_[static_cast<size_t>(n)] += part[i * row + n];
      }
      FA_RETURN_IF_ERROR(store({rows, shape.heads, shape.dim}, i, to, error));
    }
    return FA_OK;
  }

  fa_status zero(void *memory, size_t bytes, fa_stream, ErrorText &) override {
    std::fill_n(static_cast<char *>(memory), bytes, char{0});  // null where a rank has no rows
    return FA_OK;
  }

  fa_status add(double *sum, const float *part, int64_t count, fa_stream, ErrorText &) override {
    for (int64_t n = 0; n < count; ++n) sum[n] += double{part[n]};
    return FA_OK;
  }

  fa_status sum(const double *parts, int64_t num_parts, int64_t count, float *to, int64_t stride, fa_stream,
                ErrorText &) override {
    for (int64_t n = 0; n < count; ++n) {
      double sum = 0;
      for (int64_t p = 0; p < num_parts; ++p) sum += parts[p * count + n];
      to[n * stride] = static_cast<float>(sum);
    }
    return FA_OK;
  }

  fa_status write(std::span<const int64_t> numbers, int64_t *to, fa_stream, ErrorText &) override {
    std::copy(numbers.begin(), numbers.end(), to);
    return FA_OK;
  }
  fa_status read(void *to, const void *from, size_t bytes, int64_t, fa_stream, ErrorText &) override {
    std::memcpy(to, from, bytes);
    return FA_OK;
  }

  fa_stream own_stream() override { return nullptr; }
  fa_status fork(fa_stream, fa_stream &second, ErrorText &) override {
    second = nullptr;
    return FA_OK;
  }
  fa_status mark(int64_t, ErrorText &) override { return FA_OK; }
  fa_status join(int64_t, fa_stream, ErrorText &) override { return FA_OK; }
  bool is_done() override { return true; }

 private:
  // Stores rows of sums_ as rows `first` and following of `to`. A merge of one part whose lse is 0 is a conversion.
  fa_status store(const RowShape &shape, int64_t first, const Operand &to, ErrorText &error) {
    float zero = 0;
    MergePart part;
    part.out = {sums_.data(), Dtype::f32, 0, shape.heads * shape.dim, shape.dim};
    part.lse.data = &zero;
    MergeProblem merge;
    merge.batch = 1;
    merge.seqlen_q = shape.rows;
    merge.heads_q = shape.heads;
    merge.head_dim_v = shape.dim;
    merge.num_parts = 1;
    merge.parts = &part;
    merge.out = to;
    merge.out.data = static_cast<char *>(to.data) + first * to.seq_stride * dtype_bytes(to.dtype);
    return backend_.run(merge, Call{no_pointers_, {}, nullptr}, error);
  }

  Backend &backend_;
  const Pointers no_pointers_;
  std::vector<float> sums_;
  OwnWorkspace memory_;
};

}  // namespace

std::unique_ptr<RowDevice> make_row_device(Backend &backend) { return std::make_unique<HostRows>(backend); }

}  // namespace fa::cpu
