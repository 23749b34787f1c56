// SPDX-License-Identifier: Apache-2.0
#include "gpu/unfused.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <type_traits>

#include "gpu/device.h"
#include "gpu/element.cuh"
#include "gpu/matrix_math.cuh"

namespace gpu {
namespace {

void check_blas(cublasStatus_t status, const char *what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  std::fprintf(stderr, "%s: %s\n", what, cublasGetStatusString(status));
  std::abort();
}

unsigned blocks_for(int64_t count) {
  return static_cast<unsigned>(std::min<int64_t>((count + kThreads - 1) / kThreads, 65535));
}

// A growing buffer of device memory.
template <typename T>
class Array {
 public:
  Array() = default;
  ~Array() { cudaFree(data_); }
  Array(const Array &) = delete;
  Array &operator=(const Array &) = delete;
  void reserve(int64_t count) {
    if (count <= count_) return;
    cudaFree(data_);
    check(cudaMalloc(&data_, static_cast<size_t>(count) * sizeof(T)), "cudaMalloc");
    count_ = count;
  }
  T *get() const { return data_; }

 private:
  T *data_ = nullptr;
  int64_t count_ = 0;
};

template <typename T>
__device__ T from_double(double x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __double2half(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __double2bfloat16(x);
  } else {
    return static_cast<T>(x);
  }
}
template <typename Accumulator, typename T>
__device__ Accumulator widen(T x) {
  if constexpr (std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>) {
    return static_cast<Accumulator>(static_cast<float>(x));
  } else {
    return static_cast<Accumulator>(x);
  }
}

// A strided matrix of any dtype to a contiguous one of T, exactly: T is at least as wide.
template <typename T>
__global__ void gather(Matrix from, T *to) {
  const int64_t count = from.rows * from.columns;
  for (int64_t n = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; n < count; n += int64_t{gridDim.x} * blockDim.x)
    to[n] = from_double<T>(load_element(from.data, from.dtype, n / from.columns * from.row_stride + n % from.columns));
}

// Results in double, rounded to the dtype they would be stored in.
template <typename Accumulator>
__global__ void publish(const Accumulator *from, int64_t count, fa_dtype dtype, bool round, double *to) {
  for (int64_t n = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; n < count; n += int64_t{gridDim.x} * blockDim.x)
    to[n] = round ? rounded(dtype, static_cast<double>(from[n])) : static_cast<double>(from[n]);
}

// S (seqlen_q, seqlen_k) becomes P in place; one CTA per row.
template <typename T, typename Accumulator>
__global__ void softmax(T *s, double *lse, int64_t seqlen_q, int64_t seqlen_k, Mask mask) {
  const auto larger = [](Accumulator a, Accumulator b) { return a > b ? a : b; };
  const auto plus = [](Accumulator a, Accumulator b) { return a + b; };
  const int64_t i = blockIdx.x;
  T *row = s + i * seqlen_k;
  Accumulator max = -INFINITY, sum = 0;
  for (int64_t j = threadIdx.x; j < seqlen_k; j += kThreads)
    if (visible(mask, seqlen_q, seqlen_k, i, j)) max = larger(max, widen<Accumulator>(row[j]));
  max = over_block(max, larger);
  for (int64_t j = threadIdx.x; j < seqlen_k; j += kThreads)
    if (visible(mask, seqlen_q, seqlen_k, i, j)) sum += exp(widen<Accumulator>(row[j]) - max);
  sum = over_block(sum, plus);
  for (int64_t j = threadIdx.x; j < seqlen_k; j += kThreads) {
    const bool sees = visible(mask, seqlen_q, seqlen_k, i, j);
    row[j] = from_double<T>(sees ? static_cast<double>(exp(widen<Accumulator>(row[j]) - max) / sum) : 0.0);
  }
  if (threadIdx.x == 0) lse[i] = static_cast<double>(max) + log(static_cast<double>(sum));
}

// dP becomes dS = P * (dP - sum_j P dP) in place; one CTA per row.
template <typename T, typename Accumulator>
__global__ void softmax_gradient(const T *p, T *dp, int64_t seqlen_k) {
  const T *p_row = p + blockIdx.x * seqlen_k;
  T *row = dp + blockIdx.x * seqlen_k;
  Accumulator delta = 0;
  for (int64_t j = threadIdx.x; j < seqlen_k; j += kThreads) delta += widen<Accumulator>(p_row[j]) * widen<Accumulator>(row[j]);
  delta = over_block(delta, [](Accumulator a, Accumulator b) { return a + b; });
  for (int64_t j = threadIdx.x; j < seqlen_k; j += kThreads)
    row[j] = from_double<T>(static_cast<double>(widen<Accumulator>(p_row[j]) * (widen<Accumulator>(row[j]) - delta)));
}

template <typename T>
constexpr cudaDataType_t blas_type() {
  if constexpr (std::is_same_v<T, double>) return CUDA_R_64F;
  if constexpr (std::is_same_v<T, float>) return CUDA_R_32F;
  return std::is_same_v<T, __half> ? CUDA_R_16F : CUDA_R_16BF;
}

// T: what matrices are stored in. Results accumulate in Accumulator and are rounded at the end, unless T is double.
template <typename T>
class UnfusedOf final : public Unfused {
  static constexpr bool kExact = std::is_same_v<T, double>;
  using Accumulator = std::conditional_t<kExact, double, float>;

 public:
  UnfusedOf(fa_dtype dtype, cublasHandle_t blas, cudaStream_t stream) : dtype_(dtype), blas_(blas), stream_(stream) {}

  void reserve(int64_t seqlen_q, int64_t seqlen_k, int64_t head_dim, int64_t head_dim_v, bool backward) override {
    q_.reserve(seqlen_q * head_dim);
    k_.reserve(seqlen_k * head_dim);
    v_.reserve(seqlen_k * head_dim_v);
    p_.reserve(seqlen_q * seqlen_k);
    out_.reserve(seqlen_q, head_dim_v);
    lse_.reserve(seqlen_q);
    if (!backward) return;
    dout_.reserve(seqlen_q * head_dim_v);
    dp_.reserve(seqlen_q * seqlen_k);
    dq_.reserve(seqlen_q, head_dim);
    dk_.reserve(seqlen_k, head_dim);
    dv_.reserve(seqlen_k, head_dim_v);
  }

  void keys(const Matrix &k, const Matrix &v) override {
    load(k, k_);
    load(v, v_);
    seqlen_k_ = k.rows;
    head_dim_v_ = v.columns;
    first_head_ = true;
  }

  HeadResults head(const Matrix &q, const Matrix &dout, const Mask &mask, double scale) override {
    const int64_t sq = q.rows, sk = seqlen_k_, d = q.columns, dv = head_dim_v_;
    load(q, q_);
    // S = scale Q K^T; P = softmax(S); O = P V
    multiply(false, true, sq, sk, d, scale, q_.get(), k_.get(), 0, p_.get());
    softmax<T, Accumulator><<<static_cast<unsigned>(sq), kThreads, 0, stream_>>>(p_.get(), lse_.get(), sq, sk, mask);
    multiply(false, false, sq, dv, sk, 1, p_.get(), v_.get(), 0, out_.sum.get());
    HeadResults results;
    results.out = finish(out_, sq * dv);
    results.lse = lse_.get();
    if (dout.data == nullptr) return results;
    // dV += P^T dO; dP = dO V^T; dS = P (dP - D); dQ = scale dS K; dK += scale dS^T Q
    const double keep = first_head_ ? 0 : 1;
    first_head_ = false;
    load(dout, dout_);
    multiply(true, false, sk, dv, sq, 1, p_.get(), dout_.get(), keep, dv_.sum.get());
    multiply(false, true, sq, sk, dv, 1, dout_.get(), v_.get(), 0, dp_.get());
    softmax_gradient<T, Accumulator><<<static_cast<unsigned>(sq), kThreads, 0, stream_>>>(p_.get(), dp_.get(), sk);
    multiply(false, false, sq, d, sk, scale, dp_.get(), k_.get(), 0, dq_.sum.get());
    multiply(true, false, sk, d, sq, scale, dp_.get(), q_.get(), keep, dk_.sum.get());
    results.dq = finish(dq_, sq * d);
    results.dk = finish(dk_, sk * d);
    results.dv = finish(dv_, sk * dv);
    check(cudaGetLastError(), "unfused kernels");
    return results;
  }

 private:
  struct Output {
    Array<Accumulator> sum;
    Array<double> value;
    void reserve(int64_t rows, int64_t columns) {
      sum.reserve(rows * columns);
      value.reserve(rows * columns);
    }
  };

  void load(const Matrix &from, const Array<T> &to) {
    gather<<<blocks_for(from.rows * from.columns), kThreads, 0, stream_>>>(from, to.get());
  }

  const double *finish(const Output &output, int64_t count) {
    publish<<<blocks_for(count), kThreads, 0, stream_>>>(output.sum.get(), count, dtype_, !kExact, output.value.get());
    return output.value.get();
  }

  // C (m, n) = alpha op(A) op(B) + beta C, row-major; a transposed operand is stored as (k, m) or (n, k). cuBLAS is column-major
  // and so sees every matrix transposed: it computes C^T = op(B)^T op(A)^T.
  template <typename C>
  void multiply(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, double alpha, const T *a, const T *b,
                double beta, C *c) {
    const Accumulator factor = static_cast<Accumulator>(alpha), keep = static_cast<Accumulator>(beta);
    check_blas(cublasGemmEx(blas_, transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N,
                            static_cast<int>(n), static_cast<int>(m), static_cast<int>(k), &factor, b, blas_type<T>(),
                            static_cast<int>(transpose_b ? k : n), a, blas_type<T>(), static_cast<int>(transpose_a ? m : k),
                            &keep, c, blas_type<C>(), static_cast<int>(n),
                            kExact ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F_PEDANTIC, CUBLAS_GEMM_DEFAULT),
               "cublasGemmEx");
  }

  const fa_dtype dtype_;
  const cublasHandle_t blas_;
  const cudaStream_t stream_;
  int64_t seqlen_k_ = 0, head_dim_v_ = 0;
  bool first_head_ = true;  // of its key head
  Array<T> q_, k_, v_, p_, dout_, dp_;
  Output out_, dq_, dk_, dv_;
  Array<double> lse_;
};

struct ErrorSums {
  unsigned long long excess, unfused_max, exact_max;  // bits of doubles that are not negative: they order like integers
  double library_square, unfused_square, exact_square;
};

__global__ void compare_kernel(Matrix library, const double *unfused, const double *exact, double roundoff, ErrorSums *sums) {
  const int64_t count = library.rows * library.columns;
  double excess = 0, unfused_max = 0, exact_max = 0, squares[3] = {0, 0, 0};
  for (int64_t n = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; n < count; n += int64_t{gridDim.x} * blockDim.x) {
    const double want = exact[n], other = fabs(unfused[n] - want);
    const double now =
        load_element(library.data, library.dtype, n / library.columns * library.row_stride + n % library.columns);
    const double mine = now == want ? 0 : fabs(now - want);  // equal infinities too
    excess = isnan(mine) ? INFINITY : fmax(excess, mine - roundoff * fabs(want));
    if (isinf(want)) continue;
    unfused_max = fmax(unfused_max, other);
    exact_max = fmax(exact_max, fabs(want));
    squares[0] += mine * mine;
    squares[1] += other * other;
    squares[2] += want * want;
  }
  atomicMax(&sums->excess, static_cast<unsigned long long>(__double_as_longlong(excess)));
  atomicMax(&sums->unfused_max, static_cast<unsigned long long>(__double_as_longlong(unfused_max)));
  atomicMax(&sums->exact_max, static_cast<unsigned long long>(__double_as_longlong(exact_max)));
  atomicAdd(&sums->library_square, squares[0]);
  atomicAdd(&sums->unfused_square, squares[1]);
  atomicAdd(&sums->exact_square, squares[2]);
}

double from_bits(unsigned long long bits) {
  double value;
  static_assert(sizeof value == sizeof bits);
  std::copy_n(reinterpret_cast<const char *>(&bits), sizeof value, reinterpret_cast<char *>(&value));
  return value;
}

}  // namespace

std::unique_ptr<Unfused> exact_attention(cublasHandle_t blas, cudaStream_t stream) {
  return std::make_unique<UnfusedOf<double>>(FA_FLOAT32, blas, stream);
}

std::unique_ptr<Unfused> unfused_attention(fa_dtype dtype, cublasHandle_t blas, cudaStream_t stream) {
  if (dtype == FA_FLOAT16) return std::make_unique<UnfusedOf<__half>>(dtype, blas, stream);
  if (dtype == FA_BFLOAT16) return std::make_unique<UnfusedOf<__nv_bfloat16>>(dtype, blas, stream);
  return std::make_unique<UnfusedOf<float>>(dtype, blas, stream);
}

void Errors::add(const Errors &other) {
  excess = std::max(excess, other.excess);
  unfused_max = std::max(unfused_max, other.unfused_max);
  library_square += other.library_square;
  unfused_square += other.unfused_square;
  exact_square += other.exact_square;
  exact_max = std::max(exact_max, other.exact_max);
}

Errors compare(const Matrix &library, const double *unfused, const double *exact, double roundoff, cudaStream_t stream) {
  ErrorSums *sums = nullptr;
  check(cudaMalloc(&sums, sizeof *sums), "cudaMalloc");
  check(cudaMemsetAsync(sums, 0, sizeof *sums, stream), "memset");
  compare_kernel<<<blocks_for(library.rows * library.columns), kThreads, 0, stream>>>(library, unfused, exact, roundoff, sums);
  ErrorSums host{};
  check(cudaMemcpyAsync(&host, sums, sizeof host, cudaMemcpyDeviceToHost, stream), "download");
  check(cudaStreamSynchronize(stream), "compare");
  check(cudaFree(sums), "cudaFree");
  Errors errors;
  errors.excess = from_bits(host.excess);
  errors.unfused_max = from_bits(host.unfused_max);
  errors.exact_max = from_bits(host.exact_max);
  errors.library_square = host.library_square;
  errors.unfused_square = host.unfused_square;
  errors.exact_square = host.exact_square;
  return errors;
}

}  // namespace gpu
