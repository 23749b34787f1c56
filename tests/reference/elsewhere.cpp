// SPDX-License-Identifier: Apache-2.0
// A question is a Sequence and a dtype, an answer is Answers: every field in order, numbers as they lie in memory, arrays after their
// length. Both programs run on the same machine, whose processors are little-endian and have the same types.
#include "reference/elsewhere.h"

#include <sys/types.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace reference {
namespace {

template <class S, class Visit>
bool visit_sequence(S &s, Visit visit) {
  return visit(s.heads_q) && visit(s.heads_k) && visit(s.seqlen_q) && visit(s.seqlen_k) && visit(s.head_dim) &&
         visit(s.head_dim_v) && visit(s.q) && visit(s.k) && visit(s.v) && visit(s.mask) && visit(s.window_left) &&
         visit(s.window_right) && visit(s.bias) && visit(s.blocks) && visit(s.block_q) && visit(s.block_k) &&
         visit(s.has_lists) && visit(s.lists) && visit(s.elements) && visit(s.first_key) && visit(s.has_slices) &&
         visit(s.slices) && visit(s.has_key_lists) && visit(s.key_lists) && visit(s.slopes) && visit(s.alibi_log_scale) &&
         visit(s.sink) && visit(s.scale) && visit(s.softcap) && visit(s.dropout_threshold) && visit(s.dropout_seed) &&
         visit(s.dropout_offset) && visit(s.batch_index) && visit(s.dout) && visit(s.dlse);
}
template <class R, class Visit>
bool visit_result(R &r, Visit visit) {
  return visit(r.out) && visit(r.lse) && visit(r.max_logit) && visit(r.dq) && visit(r.dk) && visit(r.dv) && visit(r.dbias) &&
         visit(r.dsink);
}
template <class A, class Visit>
bool visit_answers(A &a, Visit visit) {
  return visit_result(a.exact.value, visit) && visit_result(a.exact.magnitude, visit) &&
         visit_result(a.exact.through_out, visit) && visit(a.exact.largest_logit) && visit_result(a.unfused, visit);
}

class Writer {
 public:
  explicit Writer(std::FILE *to) : to_(to) {}
  bool operator()(const std::vector<bool> &x) const { return (*this)(std::vector<char>(x.begin(), x.end())); }
  bool operator()(const std::vector<std::vector<int64_t>> &x) const {
    bool good = (*this)(x.size());
    for (const auto &row : x) good = good && (*this)(row);
    return good;
  }
  template <class T>
  bool operator()(const std::vector<T> &x) const {
    static_assert(std::is_trivially_copyable_v<T>);
    return (*this)(x.size()) && std::fwrite(x.data(), sizeof(T), x.size(), to_) == x.size();
  }
  template <class T>
  bool operator()(const T &x) const {
    static_assert(std::is_arithmetic_v<T>);
    return std::fwrite(&x, sizeof x, 1, to_) == 1;
  }

 private:
  std::FILE *to_;
};

class Reader {
 public:
  explicit Reader(std::FILE *from) : from_(from) {}
  bool operator()(std::vector<bool> &x) const {
    std::vector<char> bytes;
    const bool good = (*this)(bytes);
    x.assign(bytes.begin(), bytes.end());
    return good;
  }
  bool operator()(std::vector<std::vector<int64_t>> &x) const {
    size_t rows = 0;
    bool good = (*this)(rows);
    x.assign(rows, {});
    for (auto &row : x) good = good && (*this)(row);
    return good;
  }
  template <class T>
  bool operator()(std::vector<T> &x) const {
    size_t size = 0;
    if (!(*this)(size)) return false;
    x.resize(size);
    return std::fread(x.data(), sizeof(T), size, from_) == size;
  }
  template <class T>
  bool operator()(T &x) const {
    return std::fread(&x, sizeof x, 1, from_) == 1;
  }

 private:
  std::FILE *from_;
};

// The program of FA_TEST_REFERENCE, until this process ends.
class Elsewhere {
 public:
  explicit Elsewhere(const std::string &program) : program_(program) {
    int question[2], answer[2];
    if (pipe(question) != 0 || pipe(answer) != 0) fail("no pipes");
    const pid_t child = fork();
    if (child < 0) fail("no process");
    if (child == 0) {
      dup2(question[0], STDIN_FILENO);
      dup2(answer[1], STDOUT_FILENO);
      for (const int end : {question[0], question[1], answer[0], answer[1]}) close(end);
      execl(program.c_str(), program.c_str(), static_cast<char *>(nullptr));
      _exit(127);
    }
    close(question[0]);
    close(answer[1]);
    to_ = fdopen(question[1], "wb");
    from_ = fdopen(answer[0], "rb");
    if (to_ == nullptr || from_ == nullptr) fail("no streams");
  }

  Answers ask(const Sequence &s, fa_dtype dtype) {
    const std::lock_guard lock(mutex_);
    const Writer write(to_);
    if (!visit_sequence(s, write) || !write(dtype) || std::fflush(to_) != 0) fail("it took no question");
    Answers a;
    if (!visit_answers(a, Reader(from_))) fail("it gave no answer");
    return a;
  }

 private:
  [[noreturn]] void fail(const char *why) const { throw std::runtime_error("FA_TEST_REFERENCE=" + program_ + ": " + why); }

  const std::string program_;
  std::mutex mutex_;
  std::FILE *to_ = nullptr, *from_ = nullptr;
};

Answers answers_here(const Sequence &s, fa_dtype dtype) { return {attention(s), unfused(s, dtype)}; }

}  // namespace

bool asks_elsewhere() { return std::getenv("FA_TEST_REFERENCE") != nullptr; }

Answers answers(const Sequence &s, fa_dtype dtype) {
  if (!asks_elsewhere() || s.score || s.derivative || s.shown) return answers_here(s, dtype);
  static Elsewhere program(std::getenv("FA_TEST_REFERENCE"));
  return program.ask(s, dtype);
}

bool serve(std::FILE *in, std::FILE *out) {
  for (int next; (next = std::fgetc(in)) != EOF;) {
    std::ungetc(next, in);
    Sequence s;
    fa_dtype dtype = 0;
    const Reader read(in);
    if (!visit_sequence(s, read) || !read(dtype)) return false;
    if (!visit_answers(static_cast<const Answers &>(answers_here(s, dtype)), Writer(out)) || std::fflush(out) != 0)
      return false;
  }
  return true;
}

}  // namespace reference
