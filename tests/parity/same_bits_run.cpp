// SPDX-License-Identifier: Apache-2.0
#include "parity/same_bits_run.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <sstream>
#include <type_traits>

#include "parity/host_tensor.h"
#include "reference/number_formats.h"

namespace parity {
namespace {

using Rng = std::mt19937_64;

int64_t up_to(Rng &rng, int64_t most) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(most + 1)); }
bool one_in(Rng &rng, int64_t n) { return up_to(rng, n - 1) == 0; }
template <class T>
T one_of(Rng &rng, std::initializer_list<T> values) {
  return values.begin()[up_to(rng, static_cast<int64_t>(values.size()) - 1)];
}
double normal(Rng &rng) { return std::normal_distribution<double>()(rng); }

const char *name_of(fa_dtype dtype) {
  return dtype == FA_FLOAT32    ? "fp32"
         : dtype == FA_FLOAT16  ? "fp16"
         : dtype == FA_BFLOAT16 ? "bf16"
         : dtype == FA_INT8     ? "int8"
                                : "e4m3";
}

// A tensor whose rows are numbered within sequences, poisoned where nothing was put.
class Rows {
 public:
  // Padded or paged: (batches, rows, heads, dim); `flat`: (rows, heads, dim).
  Rows(fa_dtype dtype, bool flat, int64_t batches, int64_t rows, int64_t heads, int64_t dim, bool heads_outer)
      : size_(reference::element_bytes(dtype)) {
    const int64_t row = heads_outer ? dim : heads * dim, head = heads_outer ? rows * dim : dim;
    strides_ = {rows * heads * dim, row, head};
    tensor_.dtype = dtype;
    const int64_t shape[] = {batches, rows, heads, dim}, stride[] = {strides_[0], row, head, 1};
    tensor_.ndim = flat ? 3 : 4;
    std::copy(shape + (flat ? 1 : 0), shape + 4, tensor_.shape);
    std::copy(stride + (flat ? 1 : 0), stride + 4, tensor_.stride);
    bytes_.assign(static_cast<size_t>(batches * rows * heads * dim + 2 * kGuard) * size_, kPoison);
    tensor_.data = at(0, 0, 0);
  }

  unsigned char *at(int64_t batch, int64_t row, int64_t head) {
    return bytes_.data() + static_cast<size_t>(kGuard + batch * strides_[0] + row * strides_[1] + head * strides_[2]) * size_;
  }
  const fa_tensor &tensor() const { return tensor_; }
  size_t element() const { return size_; }
  std::vector<unsigned char> &bytes() { return bytes_; }

 private:
  static constexpr int64_t kGuard = 64;
  size_t size_;
  std::vector<int64_t> strides_;
  fa_tensor tensor_{};
  std::vector<unsigned char> bytes_;
};

fa_tensor vector_tensor(void *data, fa_dtype dtype, std::initializer_list<int64_t> shape) {
  fa_tensor t{};
  t.data = data;
  t.dtype = dtype;
  t.ndim = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), t.shape);
  int64_t stride = 1;
  for (int32_t n = t.ndim; n-- > 0; stride *= t.shape[n]) t.stride[n] = stride;
  return t;
}

// The tensors of a call in the memory of its device, in one piece.
class DeviceImage {
 public:
  // `tensor` is given the address in the device's memory that `tensor.data` has among the `bytes` from `host` on.
  void add(fa_tensor &tensor, void *host, size_t bytes) {
    parts_.push_back({&tensor, static_cast<unsigned char *>(host), bytes, size_});
    size_ += (bytes + 255) / 256 * 256;
  }
  void add(fa_tensor &tensor, Rows &rows) { add(tensor, rows.bytes().data(), rows.bytes().size()); }
  template <class T>
  void add(fa_tensor &tensor, std::vector<T> &values) {
    if (tensor.data != nullptr) add(tensor, values.data(), values.size() * sizeof(T));
  }
  void upload(Backend &backend) {
    memory_ = std::make_unique<Buffer>(backend, size_);
    std::vector<unsigned char> image(size_);
    for (const Part &part : parts_) {
      std::memcpy(image.data() + part.at, part.host, part.bytes);
      part.tensor->data = memory_->get() + part.at + (static_cast<unsigned char *>(part.tensor->data) - part.host);
    }
    backend.upload(memory_->get(), image.data(), size_);
  }
  void download(Backend &backend) const {
    std::vector<unsigned char> image(size_);
    backend.download(image.data(), memory_->get(), size_);
    for (const Part &part : parts_) std::memcpy(part.host, image.data() + part.at, part.bytes);
  }

 private:
  struct Part {
    fa_tensor *tensor;
    unsigned char *host;
    size_t bytes, at;
  };
  std::vector<Part> parts_;
  size_t size_ = 0;
  std::unique_ptr<Buffer> memory_;
};

// Numbers of the rows of a tensor; scale(row, column) changes them.
template <class Change>
std::vector<unsigned char> fill(Rng &rng, fa_dtype dtype, int64_t rows, int64_t heads, int64_t dim, Change change) {
  const size_t size = reference::element_bytes(dtype);
  std::vector<unsigned char> bytes(static_cast<size_t>(rows * heads * dim) * size);
  const double unit = dtype == FA_INT8 ? 40 : 1;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t n = 0; n < heads * dim; ++n) {
      const double x = change(i, n % dim, normal(rng));
      reference::store(bytes.data() + static_cast<size_t>(i * heads * dim + n) * size, dtype, unit * x);
    }
  }
  return bytes;
}

}  // namespace

SameBitsProblem random_problem(Rng &rng, Computer computer, bool by_pairs) {
  const bool cuda = computer != Computer::kCpu;
  SameBitsProblem p;
  p.dtype = one_of(rng, {cuda ? FA_BFLOAT16 : FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16, FA_BFLOAT16});
  p.key_dtype = p.dtype;
  if (computer != Computer::kCuda && one_in(rng, 4)) p.key_dtype = one_of(rng, {FA_FLOAT8_E4M3, FA_INT8});
  if (p.dtype == FA_FLOAT32 && one_in(rng, 4)) p.key_dtype = one_of(rng, {FA_FLOAT16, FA_BFLOAT16});
  if (is_8_bit(p.key_dtype)) p.descale = static_cast<int>(up_to(rng, cuda ? 1 : 2));
  switch (up_to(rng, 9)) {
    case 0:
    case 1:
      p.rows = 1 + up_to(rng, 40);
      break;
    case 2:
    case 3:
      p.rows = 60 + up_to(rng, 80);
      break;
    case 4:
    case 5:
      p.rows = 250 + up_to(rng, 300);
      break;
    case 6:
    case 7:
      p.rows = 1015 + up_to(rng, 30);
      break;
    default:
      p.rows = 2040 + up_to(rng, 400);
  }
  const int64_t heads = one_of<int64_t>(rng, {1, 1, 2, 3});
  p.heads_k = p.rows > 600 ? std::min<int64_t>(heads, 2) : heads;
  p.heads_q = p.heads_k * one_of<int64_t>(rng, {1, 1, 2, 4, p.rows > 600 ? 3 : 12});
  if (cuda && p.rows > 200 && one_in(rng, 2)) {  // enough heads to fill the device with tiles of queries: kernels for prompts
    p.heads_q = p.rows > 600 ? 12 : 36;
    p.heads_k = p.heads_q / one_of<int64_t>(rng, {1, 2, 4});
  }
  p.head_dim = one_of<int64_t>(rng, {1, 8, 16, 33, 40, 64, 64, 80, 96, 128, p.rows > 600 ? 48 : 256});
  p.head_dim_v = one_in(rng, 3) ? one_of<int64_t>(rng, {3, 16, 31, 64, 72, 128}) : p.head_dim;
  if (cuda && p.rows > 200 && one_in(rng, 4)) {  // kernels for prompts of more than 128 columns, several segments long
    p.head_dim = one_of<int64_t>(rng, {136, 192, 192, 256});
    p.head_dim_v = one_of<int64_t>(rng, {128, p.head_dim});
  }
  if (by_pairs && p.rows < 600 && one_in(rng, 3)) {
    p.bias = !one_in(rng, 3);
    p.mask = !p.bias || one_in(rng, 2);
    if (has_no_splits(computer, p)) p.key_dtype = p.dtype, p.descale = 0;
  }
  if (cuda && !has_no_splits(computer, p)) {  // whole vectors of 16 bytes, and not beyond the kernels' columns
    const int64_t vector = is_8_bit(p.key_dtype) ? 16 : 8, most = is_8_bit(p.key_dtype) ? 128 : 256;
    const auto served = [&](int64_t columns) { return std::min((columns + vector - 1) / vector * vector, most); };
    p.head_dim = served(p.head_dim);
    p.head_dim_v = served(p.head_dim_v);
  }
  p.causal = !one_in(rng, 6);
  if (one_in(rng, 4)) p.window_left = one_of<int64_t>(rng, {0, 1, 63, 64, 65, 300, 1000, 1100});
  if (one_in(rng, 5)) p.softcap = 3;
  p.alibi = one_in(rng, 5);
  p.sink = one_in(rng, 5);
  p.numbers = static_cast<Numbers>(up_to(rng, kNumbers - 1));
  return p;
}

SameBitsProblem random_latent_problem(Rng &rng) {
  SameBitsProblem p;
  p.latent = true;
  p.dtype = p.key_dtype = one_of(rng, {FA_FLOAT16, FA_BFLOAT16});
  p.rows = one_of<int64_t>(rng, {1, 3, 40, 100, 1000, 2020, 2048, 4100}) + up_to(rng, 30);
  p.heads_k = p.rows > 600 ? 1 : one_of<int64_t>(rng, {1, 1, 2});
  // Less than a row block for each token, and more; tokens that begin anywhere in one.
  p.heads_q = p.heads_k * (p.rows > 3000  ? 1
                           : p.rows > 600 ? one_of<int64_t>(rng, {1, 3, 16})
                                          : one_of<int64_t>(rng, {1, 5, 16, 64, 100}));
  p.head_dim = one_of<int64_t>(rng, {272, 320, 576, 576});
  p.head_dim_v = one_of<int64_t>(rng, {16, 112, 256, std::min<int64_t>(p.head_dim, 512)});
  if (one_in(rng, 4)) {
    p.key_dtype = one_of(rng, {FA_FLOAT8_E4M3, FA_INT8});
    p.descale = static_cast<int>(up_to(rng, 1));
  }
  p.causal = !one_in(rng, 6);
  if (one_in(rng, 4)) p.window_left = one_of<int64_t>(rng, {0, 1, 63, 64, 65, 300, 1000, 1100});
  p.sink = one_in(rng, 5);
  p.numbers = static_cast<Numbers>(up_to(rng, kNumbers - 1));
  return p;
}

std::string describe(const SameBitsProblem &p) {
  std::ostringstream s;
  s << name_of(p.dtype) << " queries, " << name_of(p.key_dtype) << " keys, " << p.rows << " rows, heads " << p.heads_q << "/"
    << p.heads_k << ", head_dim " << p.head_dim << "/" << p.head_dim_v << (p.latent ? " in k" : "")
    << (p.causal ? ", causal" : "") << ", window_left " << p.window_left << ", softcap " << p.softcap
    << (p.alibi ? ", alibi" : "") << (p.sink ? ", sink" : "") << (p.bias ? ", bias" : "") << (p.mask ? ", element mask" : "")
    << ", descale " << p.descale << ", numbers " << static_cast<int>(p.numbers);
  return s.str();
}

SameBitsSequence make_sequence(const SameBitsProblem &p, Rng &rng) {
  SameBitsSequence s;
  const bool narrow = p.dtype == FA_FLOAT16 || is_8_bit(p.key_dtype), bytes = is_8_bit(p.key_dtype);
  const Numbers kind = p.numbers;
  s.q = fill(rng, p.dtype, p.rows, p.heads_q, p.head_dim, [&](int64_t i, int64_t, double x) {
    if (kind == Numbers::kRising) return 0.5 + 0.3 * x;
    if (kind == Numbers::kExtreme && i % 3 == 1) return x * (narrow ? 1e-6 : 1e-39);
    return x;
  });
  s.k = fill(rng, p.key_dtype, p.rows, p.heads_k, p.head_dim, [&](int64_t j, int64_t, double x) {
    if (kind == Numbers::kRising && !bytes) return 0.3 * x + 0.1 * static_cast<double>(j / 64);
    if (kind == Numbers::kSpikes && (j % 256 == 0 || j % 256 == 255)) return (bytes ? 40 : 5) * x;
    if (kind == Numbers::kExtreme && j % 7 == 2) return x * (bytes ? 8 : narrow ? 1000 : 0x1p66);
    if (kind == Numbers::kExtreme && j % 7 == 4) return x * (narrow ? 1e-6 : 1e-39);
    return x;
  });
  s.v = fill(rng, p.key_dtype, p.rows, p.heads_k, p.head_dim_v, [&](int64_t j, int64_t c, double x) {
    if (kind == Numbers::kPositive) return std::abs(x);
    if (kind == Numbers::kWide) return std::ldexp(x, static_cast<int>(bytes ? up_to(rng, 4) : up_to(rng, 14)) - 7);
    if (kind == Numbers::kExtreme && j % 5 == 0) return x * (narrow ? 1e-6 : 1e-39);
    if (kind == Numbers::kTiny) return c % 2 == 0 ? -std::abs(x) * (narrow ? 1e-7 : 1e-44) : x * (narrow ? 1e-6 : 1e-38);
    return x;
  });
  if (p.latent) {
    const size_t size = reference::element_bytes(p.key_dtype), of_k = static_cast<size_t>(p.head_dim) * size,
                 of_v = static_cast<size_t>(p.head_dim_v) * size;
    for (size_t n = 0; n < static_cast<size_t>(p.rows * p.heads_k); ++n)
      std::memcpy(s.v.data() + n * of_v, s.k.data() + n * of_k, of_v);
  }
  for (std::vector<float> *factors : {&s.k_descale, &s.v_descale}) {
    if (p.descale == 0) continue;
    for (int64_t n = 0; n < p.rows * p.heads_k; ++n) {
      const float fresh = std::ldexp(0.6f + 0.01f * static_cast<float>(up_to(rng, 90)), -static_cast<int>(up_to(rng, 5)));
      factors->push_back(p.descale == 1 && n >= p.heads_k ? (*factors)[static_cast<size_t>(n - p.heads_k)] : fresh);
    }
  }
  for (int64_t h = 0; h < p.heads_q; ++h) {
    s.slopes.push_back(static_cast<float>(0.01 * static_cast<double>(1 + up_to(rng, 30))));
    s.sinks.push_back(static_cast<float>(normal(rng)));
  }
  const int64_t pairs = p.rows * p.rows;
  for (int64_t n = 0; p.bias && n < pairs; ++n)
    s.bias.push_back(one_in(rng, 20) ? -std::numeric_limits<float>::infinity() : static_cast<float>(normal(rng)));
  for (int64_t n = 0; p.mask && n < pairs; ++n) s.mask.push_back(n / 64 % 3 != 0 && !one_in(rng, 10));
  return s;
}

SameBitsCall whole(const SameBitsProblem &p) {
  SameBitsCall c;
  c.end_row = c.keys = p.rows;
  c.end_head = p.heads_q;
  return c;
}

SameBitsCall random_call(const SameBitsProblem &p, Rng &rng) {
  SameBitsCall c = whole(p);
  switch (up_to(rng, 5)) {
    case 0:
      break;
    case 1:
      c.first_row = up_to(rng, p.rows - 1);
      c.end_row = c.first_row + 1;
      break;
    case 2:
      c.first_row = up_to(rng, p.rows - 1);
      c.end_row = p.rows;
      break;
    case 3:
      c.end_row = 1 + up_to(rng, p.rows - 1);
      break;
    default:
      c.first_row = up_to(rng, p.rows - 1);
      c.end_row = std::min(p.rows, c.first_row + 1 + up_to(rng, one_of<int64_t>(rng, {3, 15, 200})));
  }
  if (p.aligned() && !p.causal) c.end_row = p.rows;
  c.keys = p.causal ? c.end_row : p.rows;
  if (one_in(rng, 2)) {
    if (p.group() > 1 && one_in(rng, 2)) {  // some heads of one group
      const int64_t first = up_to(rng, p.heads_k - 1) * p.group(), at = up_to(rng, p.group() - 1);
      c.first_head = first + at;
      c.end_head = c.first_head + 1 + up_to(rng, p.group() - at - 1);
    } else {
      const int64_t first = up_to(rng, p.heads_k - 1);
      c.first_head = first * p.group();
      c.end_head = (first + 1 + up_to(rng, p.heads_k - first - 1)) * p.group();
    }
  }
  c.storage = static_cast<Storage>(up_to(rng, 3));
  c.page_size = one_of<int64_t>(rng, {1, 3, 16, 64, 256, 1000});
  c.heads_outer = one_in(rng, 2);
  const int64_t most = c.keys * (c.end_row - c.first_row) > 200000 ? 1 : one_in(rng, 6) ? 14 : 4;
  c.mates_before = one_in(rng, 2) ? up_to(rng, most) : 0;
  c.mates_after = one_in(rng, 2) ? up_to(rng, most) : 0;
  c.num_splits = one_of(rng, {0, 0, 1, 3, 64});
  return c;
}

std::string describe(const SameBitsCall &c) {
  const char *const storages[] = {"padded", "used", "packed", "paged"};
  std::ostringstream s;
  s << "rows " << c.first_row << " to " << c.end_row << " of " << c.keys << " keys, heads " << c.first_head << " to "
    << c.end_head << ", " << storages[static_cast<int>(c.storage)] << " (page_size " << c.page_size << ", heads_outer "
    << c.heads_outer << "), " << c.mates_before << " sequences before and " << c.mates_after << " after it, num_splits "
    << c.num_splits;
  return s.str();
}

SameBitsResult run(Backend &backend, const SameBitsProblem &p, const SameBitsSequence &s, const SameBitsCall &c, Rng &rng,
                   uint32_t flags) {
  const int64_t batch = c.mates_before + 1 + c.mates_after, own = c.mates_before;
  const int64_t heads = c.end_head - c.first_head, first_key_head = c.first_head / p.group();
  const int64_t heads_k = (c.end_head - 1) / p.group() - first_key_head + 1;
  const bool free_lengths = c.storage == Storage::kUsed || c.storage == Storage::kPacked;

  // Lengths of all sequences. With pages every sequence has as many queries.
  std::vector<int64_t> queries(static_cast<size_t>(batch), c.end_row - c.first_row), keys(static_cast<size_t>(batch), c.keys);
  for (int64_t b = 0; b < batch; ++b) {
    if (b == own || c.storage == Storage::kPadded) continue;
    keys[b] = up_to(rng, 700);
    if (free_lengths) queries[b] = up_to(rng, 12);
  }
  const int64_t most_q = *std::max_element(queries.begin(), queries.end()),
                most_k = *std::max_element(keys.begin(), keys.end());
  const auto starts_of = [&](const std::vector<int64_t> &lengths) {
    std::vector<int32_t> starts{static_cast<int32_t>(up_to(rng, 3))};
    for (const int64_t n : lengths) starts.push_back(starts.back() + static_cast<int32_t>(n));
    return starts;
  };
  std::vector<int32_t> starts_q = starts_of(queries), starts_k = starts_of(keys);

  // Where row r of sequence b lies.
  const bool packed = c.storage == Storage::kPacked, paged = c.storage == Storage::kPaged;
  const int64_t rows_q = packed ? starts_q.back() + 2 : most_q + (c.storage == Storage::kUsed ? 5 : 0);
  const int64_t pages_each = paged ? (most_k + c.page_size - 1) / c.page_size + 1 : 0;
  const int64_t rows_k = packed ? starts_k.back() + 2 : paged ? c.page_size : most_k + (c.storage == Storage::kUsed ? 7 : 0);
  std::vector<int32_t> table(static_cast<size_t>(batch * pages_each));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), rng);
  const int64_t tensors_k = paged ? batch * pages_each : batch;
  const bool outer = c.heads_outer && !packed && !paged;
  Rows q(p.dtype, packed, packed ? 1 : batch, rows_q, heads, p.head_dim, outer);
  Rows out(p.dtype, packed, packed ? 1 : batch, rows_q, heads, p.head_dim_v, outer);
  Rows k(p.key_dtype, packed, packed ? 1 : tensors_k, rows_k, heads_k, p.head_dim, outer);
  Rows v(p.key_dtype, packed, packed ? 1 : tensors_k, rows_k, heads_k, p.head_dim_v, outer);
  const bool per_row = p.descale == 2;
  const int64_t factor_rows = per_row ? rows_k : 1;
  Rows k_descales(FA_FLOAT32, false, per_row ? (packed ? 1 : tensors_k) : batch, factor_rows, heads_k, 1, false);
  Rows v_descales = k_descales;
  const auto place_q = [&](Rows &rows, int64_t b, int64_t i, int64_t h) {
    return packed ? rows.at(0, starts_q[b] + i, h) : rows.at(b, i, h);
  };
  const auto place_k = [&](Rows &rows, int64_t b, int64_t j, int64_t h) {
    if (packed) return rows.at(0, starts_k[b] + j, h);
    return paged ? rows.at(table[b * pages_each + j / c.page_size], j % c.page_size, h) : rows.at(b, j, h);
  };

  for (int64_t b = 0; b < batch; ++b) {
    const double magnitude = one_of(rng, {1.0, 1.0, 50.0});
    const auto mate = [&](unsigned char *to, fa_dtype dtype, int64_t dim, double scale) {
      const size_t size = reference::element_bytes(dtype);
      for (int64_t n = 0; n < dim; ++n) reference::store(to + static_cast<size_t>(n) * size, dtype, scale * normal(rng));
    };
    for (int64_t i = 0; i < queries[b]; ++i) {
      for (int64_t h = 0; h < heads; ++h) {
        unsigned char *to = place_q(q, b, i, h);
        const size_t bytes = static_cast<size_t>(p.head_dim) * q.element();
        if (b != own) {
          mate(to, p.dtype, p.head_dim, magnitude);
        } else {
          std::memcpy(to, s.q.data() + static_cast<size_t>((c.first_row + i) * p.heads_q + c.first_head + h) * bytes, bytes);
        }
      }
    }
    for (int64_t j = 0; j < keys[b]; ++j) {
      for (int64_t h = 0; h < heads_k; ++h) {
        const auto row = static_cast<size_t>(j * p.heads_k + first_key_head + h);
        const size_t bytes = static_cast<size_t>(p.head_dim) * k.element(),
                     bytes_v = static_cast<size_t>(p.head_dim_v) * v.element();
        if (b != own) {
          mate(place_k(k, b, j, h), p.key_dtype, p.head_dim, magnitude);
          mate(place_k(v, b, j, h), p.key_dtype, p.head_dim_v, 1);
        } else {
          std::memcpy(place_k(k, b, j, h), s.k.data() + row * bytes, bytes);
          std::memcpy(place_k(v, b, j, h), s.v.data() + row * bytes_v, bytes_v);
        }
        if (p.descale == 0 || (!per_row && j > 0)) continue;
        const float factors[] = {b == own ? s.k_descale[row] : 0.5f, b == own ? s.v_descale[row] : 2.0f};
        std::memcpy(per_row ? place_k(k_descales, b, j, h) : k_descales.at(b, 0, h), &factors[0], sizeof(float));
        std::memcpy(per_row ? place_k(v_descales, b, j, h) : v_descales.at(b, 0, h), &factors[1], sizeof(float));
      }
    }
    if (p.descale == 1 && keys[b] == 0) {
      const float one = 1;
      for (int64_t h = 0; h < heads_k; ++h) {
        std::memcpy(k_descales.at(b, 0, h), &one, sizeof one);
        std::memcpy(v_descales.at(b, 0, h), &one, sizeof one);
      }
    }
  }

  fa_attention a;
  fa_attention_init(&a, sizeof a);
  a.flags = flags;
  a.num_splits = c.num_splits;
  a.q = q.tensor(), a.k = k.tensor(), a.v = v.tensor(), a.out = out.tensor();
  a.mask = p.causal ? FA_MASK_CAUSAL : FA_MASK_NONE;
  if (p.window_left >= 0) a.window = FA_WINDOW_LEFT, a.window_left = p.window_left;
  a.softcap = p.softcap;
  std::vector<float> lse(static_cast<size_t>(heads * batch * rows_q), NAN);
  a.lse = packed ? vector_tensor(lse.data(), FA_FLOAT32, {heads, rows_q})
                 : vector_tensor(lse.data(), FA_FLOAT32, {batch, heads, rows_q});
  std::vector<float> slopes(s.slopes.begin() + c.first_head, s.slopes.begin() + c.end_head),
      sinks(s.sinks.begin() + c.first_head, s.sinks.begin() + c.end_head);
  if (p.alibi) a.alibi_slopes = vector_tensor(slopes.data(), FA_FLOAT32, {heads});
  if (p.sink) a.sink = vector_tensor(sinks.data(), FA_FLOAT32, {heads});
  // Of all pairs of rows that tensors of these sizes have: those of the call's keys, from the first of its queries on.
  const int64_t pair_rows = packed ? most_q : rows_q, pair_keys = packed ? most_k : paged ? pages_each * c.page_size : rows_k;
  const auto pairs_of = [&](const auto &whole) {
    std::remove_cvref_t<decltype(whole)> part(static_cast<size_t>(pair_rows * pair_keys));
    for (int64_t i = 0; i < queries[own]; ++i)
      std::copy_n(whole.begin() + (c.first_row + i) * p.rows, c.keys, part.begin() + i * pair_keys);
    return part;
  };
  std::vector<float> bias;
  std::vector<unsigned char> mask;
  if (p.bias) bias = pairs_of(s.bias), a.bias = vector_tensor(bias.data(), FA_FLOAT32, {1, 1, pair_rows, pair_keys});
  if (p.mask) mask = pairs_of(s.mask), a.element_mask = vector_tensor(mask.data(), FA_UINT8, {1, 1, pair_rows, pair_keys});
  std::vector<int32_t> used_q(queries.begin(), queries.end()), used_k(keys.begin(), keys.end());
  if (packed) {
    a.cu_seqlens_q = vector_tensor(starts_q.data(), FA_INT32, {batch + 1});
    a.cu_seqlens_k = vector_tensor(starts_k.data(), FA_INT32, {batch + 1});
    if (p.bias || p.mask || one_in(rng, 2)) a.max_seqlen_q = most_q, a.max_seqlen_k = most_k;
  }
  if (c.storage == Storage::kUsed) a.seqused_q = vector_tensor(used_q.data(), FA_INT32, {batch});
  if (c.storage == Storage::kUsed || paged) a.seqused_k = vector_tensor(used_k.data(), FA_INT32, {batch});
  if (paged) a.page_table = vector_tensor(table.data(), FA_INT32, {batch, pages_each});
  const auto descale = [&](Rows &factors) {
    if (!per_row) return vector_tensor(factors.at(0, 0, 0), FA_FLOAT32, {batch, heads_k});
    return vector_tensor(factors.at(0, 0, 0), FA_FLOAT32, {packed ? 1 : tensors_k, rows_k, heads_k});
  };
  if (p.descale != 0) a.k_descale = descale(k_descales), a.v_descale = descale(v_descales);

  DeviceImage image;
  image.add(a.q, q), image.add(a.k, k), image.add(a.out, out), image.add(a.lse, lse);
  if (!p.latent) image.add(a.v, v);
  image.add(a.alibi_slopes, slopes), image.add(a.sink, sinks), image.add(a.page_table, table);
  image.add(a.cu_seqlens_q, starts_q), image.add(a.cu_seqlens_k, starts_k);
  image.add(a.bias, bias), image.add(a.element_mask, mask);
  image.add(a.seqused_q, used_q), image.add(a.seqused_k, used_k);
  if (p.descale != 0) image.add(a.k_descale, k_descales), image.add(a.v_descale, v_descales);
  image.upload(backend);
  if (p.latent) {
    a.v = a.k;
    a.v.shape[a.v.ndim - 1] = p.head_dim_v;
  }

  SameBitsResult result;
  fa_plan_info plan;
  fa_plan_info_init(&plan, sizeof plan);
  if (fa_forward_query(backend.context(), &a, &plan) == FA_OK) result.kernel = plan.kernel;
  result.status = fa_forward(backend.context(), &a, nullptr, 0, backend.stream());
  result.error = fa_last_error(backend.context());
  image.download(backend);
  const size_t bytes = static_cast<size_t>(p.head_dim_v) * out.element();
  for (int64_t i = 0; i < queries[own]; ++i) {
    for (int64_t h = 0; h < heads; ++h) {
      const unsigned char *from = place_q(out, own, i, h);
      result.out.insert(result.out.end(), from, from + bytes);
      result.lse.push_back(packed ? lse[static_cast<size_t>(h * rows_q + starts_q[own] + i)]
                                  : lse[static_cast<size_t>((own * heads + h) * rows_q + i)]);
    }
  }
  return result;
}

}  // namespace parity
