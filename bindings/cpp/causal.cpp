// SPDX-License-Identifier: Apache-2.0
// Causal attention of 8 heads over 1024 rows, forward and backward.
#include <flashattn/flashattn.hpp>
#include <iostream>
#include <vector>

int main() try {
  constexpr int64_t rows = 1024, heads = 8, dim = 64;
  std::vector<float> q(rows * heads * dim, 0.5f), k(q), v(q), dout(q), out(q.size()), dq(q.size()), dk(q.size()), dv(q.size());
  std::vector<float> lse(heads * rows);
  const auto view = [&](std::vector<float> &x) { return flashattn::tensor(x.data(), {1, rows, heads, dim}); };

  flashattn::context ctx = flashattn::context::cpu();
  flashattn::attention att(view(q), view(k), view(v), view(out), {lse.data(), {1, heads, rows}});
  att.causal();
  ctx.forward(att);
  ctx.backward(att, flashattn::gradients(view(dout), view(dq), view(dk), view(dv)));
  std::cout << "kernel " << ctx.query(att).kernel << ", out[0] = " << out[0] << '\n';
} catch (const flashattn::error &failed) {
  std::cerr << failed.what() << '\n';
  return 1;
}
