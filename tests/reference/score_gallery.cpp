// SPDX-License-Identifier: Apache-2.0
#include "reference/score_gallery.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/number_formats.h"

namespace reference {
namespace {

using Position = fa_score_position;
using Aux = fa_score_aux;

// An element of tensor n, by the indices of its dimensions. The stride of a dimension of size 1 is 0.
double element(const Aux &aux, int32_t n, int64_t i0, int64_t i1 = 0, int64_t i2 = 0, int64_t i3 = 0) {
  const fa_tensor &t = aux.tensors[n];
  const int64_t index[4] = {i0, i1, i2, i3};
  int64_t at = 0;
  for (int32_t d = 0; d < t.ndim; ++d) at += index[d] * t.stride[d];
  return load(static_cast<const char *>(t.data) + at * static_cast<int64_t>(element_bytes(t.dtype)), t.dtype);
}
// The element of a tensor that is indexed by the pair.
double of_pair(const Aux &aux, int32_t n, const Position &p) { return element(aux, n, p.b, p.h, p.i, p.j); }

// The key that a query is aligned with, bottom-right.
int64_t diagonal(const Position &p) { return p.i + p.s_k - p.s_q; }
// From the key to that one.
double distance(const Position &p) { return static_cast<double>(diagonal(p) - p.j); }

// Each function is a struct. `real` is float in the library and double in the reference.

// A learned bias for each head and distance, in a table of (heads_q, 2 * kReach + 1).
struct RelativePosition {
  static constexpr int64_t kReach = 16;
  template <class real>
  static real score(real s, const Position &p, const Aux &aux) {
    const int64_t distance = std::clamp(p.j - diagonal(p), -kReach, kReach);
    return s + static_cast<real>(element(aux, 0, p.h, distance + kReach));
  }
  template <class real>
  static real derivative(real, const Position &, const Aux &) {
    return 1;
  }
};

// T5: a bias for each bucket of distances, in a table of (kBuckets, heads_q). Far distances share buckets by their logarithm.
struct T5Buckets {
  static constexpr int64_t kBuckets = 32, kFar = 128;
  static int64_t bucket(int64_t distance) {
    const int64_t half = kBuckets / 2, exact = half / 2, side = distance > 0 ? half : 0, n = std::abs(distance);
    if (n < exact) return side + n;
    const double far = std::log(static_cast<double>(n) / static_cast<double>(exact)) /
                       std::log(static_cast<double>(kFar) / static_cast<double>(exact)) * static_cast<double>(half - exact);
    return side + std::min(exact + static_cast<int64_t>(far), half - 1);
  }
  template <class real>
  static real score(real s, const Position &p, const Aux &aux) {
    return s + static_cast<real>(element(aux, 0, bucket(p.j - diagonal(p)), p.h));
  }
  template <class real>
  static real derivative(real, const Position &, const Aux &) {
    return 1;
  }
};

// ALiBi that treats keys ahead differently: slope times the distance behind, half of it ahead.
struct Alibi {
  template <class real>
  static real score(real s, const Position &p, const Aux &aux) {
    const real behind = static_cast<real>(distance(p)), slope = static_cast<real>(of_pair(aux, 0, p));
    return behind > 0 ? s - slope * behind : s + slope * behind / 2;
  }
  template <class real>
  static real derivative(real, const Position &, const Aux &) {
    return 1;
  }
};

// Causal, but every query sees the first keys, as many as tensor 0 says of the sequence.
struct PrefixLm {
  static bool visible(const Position &p, const Aux &aux) {
    return p.j <= diagonal(p) || static_cast<double>(p.j) < of_pair(aux, 0, p);
  }
};

// Queries see the keys of their own document. The ids of documents do not decrease along a sequence, so that the ends of a tile tell
// whether it is empty or full.
struct Documents {
  static bool visible(const Position &p, const Aux &aux) { return of_pair(aux, 0, p) == of_pair(aux, 1, p); }
  static fa_score_tile tile(const Position &p, int64_t queries, int64_t keys, const Aux &aux) {
    Position last = p;
    last.i += queries - 1;
    last.j += keys - 1;
    const double q0 = of_pair(aux, 0, p), q1 = of_pair(aux, 0, last), k0 = of_pair(aux, 1, p), k1 = of_pair(aux, 1, last);
    if (q1 < k0 || k1 < q0) return FA_SCORE_TILE_EMPTY;
    return q0 == q1 && k0 == k1 && q0 == k0 ? FA_SCORE_TILE_FULL : FA_SCORE_TILE_PARTIAL;
  }
};

// A window of scalars[0] keys on both sides, besides scalars[1] global tokens that see all and are seen by all.
struct WindowWithGlobals {
  static bool visible(const Position &p, const Aux &aux) {
    const auto window = static_cast<int64_t>(aux.scalars[0]), global = static_cast<int64_t>(aux.scalars[1]);
    return std::abs(diagonal(p) - p.j) <= window || p.j < global || p.i < global;
  }
  static fa_score_tile tile(const Position &p, int64_t queries, int64_t keys, const Aux &aux) {
    const auto window = static_cast<int64_t>(aux.scalars[0]), global = static_cast<int64_t>(aux.scalars[1]);
    const int64_t nearest = std::max(p.j - (diagonal(p) + queries - 1), diagonal(p) - (p.j + keys - 1));
    if (nearest > window && p.j >= global && p.i >= global) return FA_SCORE_TILE_EMPTY;
    const int64_t farthest = std::max(p.j + keys - 1 - diagonal(p), diagonal(p) + queries - 1 - p.j);
    return farthest <= window ? FA_SCORE_TILE_FULL : FA_SCORE_TILE_PARTIAL;
  }
};

// Tokens are pixels of an image with rows of scalars[0]; a query sees the pixels at most scalars[1] rows and columns away.
struct Neighbourhood {
  static bool visible(const Position &p, const Aux &aux) {
    const auto width = static_cast<int64_t>(aux.scalars[0]), reach = static_cast<int64_t>(aux.scalars[1]);
    return std::abs(p.i / width - p.j / width) <= reach && std::abs(p.i % width - p.j % width) <= reach;
  }
  static fa_score_tile tile(const Position &p, int64_t queries, int64_t keys, const Aux &aux) {
    const auto width = static_cast<int64_t>(aux.scalars[0]), reach = static_cast<int64_t>(aux.scalars[1]);
    const int64_t above = p.i / width - (p.j + keys - 1) / width, below = p.j / width - (p.i + queries - 1) / width;
    return above > reach || below > reach ? FA_SCORE_TILE_EMPTY : FA_SCORE_TILE_PARTIAL;
  }
};

// Scores stay within scalars[0].
struct Softcap {
  template <class real>
  static real score(real s, const Position &, const Aux &aux) {
    const real cap = aux.scalars[0];
    return cap * std::tanh(s / cap);
  }
  template <class real>
  static real derivative(real s, const Position &, const Aux &aux) {
    const real t = std::tanh(s / static_cast<real>(aux.scalars[0]));
    return 1 - t * t;
  }
};

// Keeps the entropy of longer sequences: scores grow with the logarithm of the keys, relative to scalars[0] keys.
struct LogN {
  template <class real>
  static real derivative(real, const Position &p, const Aux &aux) {
    return std::log(static_cast<real>(p.s_k + 1)) / std::log(static_cast<real>(aux.scalars[0]));
  }
  template <class real>
  static real score(real s, const Position &p, const Aux &aux) {
    return s * derivative<real>(s, p, aux);
  }
};

// A gate for each head and query opens and closes with the score.
struct TanhGate {
  template <class real>
  static real score(real s, const Position &p, const Aux &aux) {
    const real gate = static_cast<real>(of_pair(aux, 0, p));
    return s * (1 + std::tanh(gate * s)) / 2;
  }
  template <class real>
  static real derivative(real s, const Position &p, const Aux &aux) {
    const real gate = static_cast<real>(of_pair(aux, 0, p)), t = std::tanh(gate * s);
    return (1 + t + s * gate * (1 - t * t)) / 2;
  }
};

// Masks by scores of -inf, whatever the score was.
struct Sieve {
  static bool open(const Position &p, const Aux &) { return (7 * p.i + 3 * p.j + p.h) % 5 != 0; }
  template <class real>
  static real score(real s, const Position &p, const Aux &aux) {
    return open(p, aux) ? s : -std::numeric_limits<real>::infinity();
  }
  template <class real>
  static real derivative(real, const Position &, const Aux &) {
    return 1;
  }
};

// A bias for each pair and half of that of the key before, of which some are -inf.
struct PairBias {
  static Position before(Position p) {
    p.j = p.j > 0 ? p.j - 1 : 0;
    return p;
  }
  static bool open(const Position &p, const Aux &aux) {
    return of_pair(aux, 0, p) + of_pair(aux, 0, before(p)) != -std::numeric_limits<float>::infinity();
  }
  template <class real>
  static real score(real s, const Position &p, const Aux &aux) {
    if (!open(p, aux)) return -std::numeric_limits<real>::infinity();
    return s + static_cast<real>(of_pair(aux, 0, p)) + static_cast<real>(of_pair(aux, 0, before(p))) / 2;
  }
  template <class real>
  static real derivative(real, const Position &, const Aux &) {
    return 1;
  }
};

// The functions of a pair and of a run that the library takes, made of one of the structs above.
template <class Function>
float score_of(float s, const Position *p, const Aux *aux) {
  return Function::template score<float>(s, *p, *aux);
}
template <class Function>
float derivative_of(float s, const Position *p, const Aux *aux) {
  return Function::template derivative<float>(s, *p, *aux);
}
template <class Function>
void run_of(float *s, float *derivative, const Position *first, int64_t keys, const Aux *aux) {
  Position p = *first;
  for (int64_t n = 0; n < keys; ++n, ++p.j) {
    if (derivative != nullptr) derivative[n] = Function::template derivative<float>(s[n], p, *aux);
    s[n] = Function::template score<float>(s[n], p, *aux);
  }
}
template <class Function>
int32_t visible_of(const Position *p, const Aux *aux) {
  return Function::visible(*p, *aux) ? 1 : 0;
}
template <class Function>
void visible_run_of(uint8_t *visible, const Position *first, int64_t keys, const Aux *aux) {
  Position p = *first;
  for (int64_t n = 0; n < keys; ++n, ++p.j) visible[n] = Function::visible(p, *aux);
}
template <class Function>
fa_score_tile tile_of(const Position *first, int64_t queries, int64_t keys, const Aux *aux) {
  return Function::tile(*first, queries, keys, *aux);
}

// This file, for the texts of the functions.
__asm__(
    ".pushsection .rodata\n"
    "score_gallery_source:\n"
    ".incbin \"" __FILE__
    "\"\n"
    ".byte 0\n"
    ".popsection\n");
extern "C" const char score_gallery_source[];

// What stands between the braces of a struct: the same functions as free ones.
std::string text_of(const std::string &name) {
  const std::string source = score_gallery_source, head = "\nstruct " + name + " {\n";
  const size_t begin = source.find(head) + head.size();
  return source.substr(begin, source.find("\n};\n", begin) - begin);
}

std::string renamed(std::string text, const std::string &from, const std::string &to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
  return text;
}

template <class Function>
GalleryFunction make(const char *name, const char *struct_name, std::vector<GalleryTensor> tensors,
                     std::vector<float> scalars) {
  GalleryFunction f;
  f.name = name;
  f.text = text_of(struct_name);
  f.text_without_derivative = renamed(f.text, "derivative", "slope");
  fa_score_source_init(&f.source, sizeof f.source);
  if constexpr (requires(Position p, Aux aux) { Function::template score<float>(0.0f, p, aux); }) {
    f.source.score = score_of<Function>;
    f.source.derivative = derivative_of<Function>;
    f.source.run = f.source.run_backward = run_of<Function>;
    f.score = Function::template score<double>;
    f.derivative = Function::template derivative<double>;
  }
  if constexpr (requires(Position p, Aux aux) { Function::visible(p, aux); }) {
    f.source.visible = visible_of<Function>;
    f.source.run_visible = visible_run_of<Function>;
    f.visible = Function::visible;
  }
  if constexpr (requires(Position p, Aux aux) { Function::tile(p, 1, 1, aux); }) f.source.tile = tile_of<Function>;
  f.tensors = std::move(tensors);
  f.scalars = std::move(scalars);
  return f;
}

const std::vector<GalleryFunction> &functions() {
  constexpr uint32_t kB = FA_SCORE_BY_BATCH, kH = FA_SCORE_BY_HEAD, kQ = FA_SCORE_BY_QUERY, kK = FA_SCORE_BY_KEY;
  static const std::vector<GalleryFunction> all = [] {
    std::vector<GalleryFunction> list;
    list.push_back(make<RelativePosition>("relative position", "RelativePosition",
                                          {{FA_FLOAT32, FA_SCORE_BY_ANY, {0, 2 * RelativePosition::kReach + 1}}}, {}));
    list.push_back(make<T5Buckets>("T5 buckets", "T5Buckets", {{FA_BFLOAT16, FA_SCORE_BY_ANY, {T5Buckets::kBuckets, 0}}}, {}));
    list.push_back(make<Alibi>("ALiBi", "Alibi", {{FA_FLOAT32, kH, {}}}, {}));
    list.push_back(make<PrefixLm>("prefix-LM", "PrefixLm", {{FA_INT64, kB, {}, GalleryTensor::kPrefixes}}, {}));
    list.push_back(make<Documents>(
        "documents", "Documents",
        {{FA_INT32, kB | kQ, {}, GalleryTensor::kDocumentsQ}, {FA_INT32, kB | kK, {}, GalleryTensor::kDocumentsK}}, {}));
    list.push_back(make<WindowWithGlobals>("window with globals", "WindowWithGlobals", {}, {20, 3}));
    list.push_back(make<Neighbourhood>("2-D neighbourhood", "Neighbourhood", {}, {17, 3}));
    list.push_back(make<Softcap>("softcap", "Softcap", {}, {3}));
    list.push_back(make<LogN>("log-N scaling", "LogN", {}, {32}));
    list.push_back(make<TanhGate>("tanh gate", "TanhGate", {{FA_FLOAT16, kH | kQ, {}}}, {}));
    list.push_back(make<Sieve>("sieve", "Sieve", {}, {}));
    list.back().visible = Sieve::open;
    list.push_back(make<PairBias>("pair bias", "PairBias", {{0, kH | kQ | kK, {}, GalleryTensor::kMaskingNumbers}}, {}));
    list.back().visible = PairBias::open;
    return list;
  }();
  return all;
}

}  // namespace

int64_t gallery_size() { return static_cast<int64_t>(functions().size()); }

const GalleryFunction &gallery(int64_t number) { return functions().at(static_cast<size_t>(number - 1)); }

fa_score_source gallery_source(int64_t number, bool runs) {
  fa_score_source source = gallery(number).source;
  source.text = runs ? gallery(number).text_without_derivative.c_str() : gallery(number).text.c_str();
  if (!runs) {
    source.run = source.run_backward = nullptr;
    source.run_visible = nullptr;
  }
  return source;
}

}  // namespace reference
