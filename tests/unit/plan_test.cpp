// SPDX-License-Identifier: Apache-2.0
// The plan is a pure function of shapes and machine: no tensor is read, and nothing grows with seqlen_q * seqlen_k.
#include <gtest/gtest.h>

#include <string>

#include "cpu/launch.h"

namespace fa::cpu {
namespace {

float unreadable;  // an address that plans may compare with null but not follow beyond

ScoredForward problem(int64_t seqlen_q, int64_t seqlen_k, int64_t head_dim = 64) {
  ScoredForward p;
  p.batch = 2;
  p.heads_q = 8;
  p.heads_k = 4;
  p.group = 2;
  p.head_dim = p.head_dim_v = head_dim;
  p.q_lengths.max_len = seqlen_q;
  p.k_lengths.max_len = seqlen_k;
  p.q.data = p.k.data = p.v.data = p.out.data = &unreadable;
  p.lse.data = &unreadable;
  p.softmax_scale = 1;
  return p;
}

ScoredBackward backward_problem(int64_t seqlen) {
  ScoredBackward b;
  b.forward = problem(seqlen, seqlen);
  b.dout.data = b.dq.data = b.dk.data = b.dv.data = &unreadable;
  return b;
}

TEST(Plan, HasANameAndAReason) {
  for (const int64_t seqlen_q : {1, 5, 2000}) {
    const Plan plan = plan_forward(problem(seqlen_q, 2000), Machine{FA_CPU_ISA_PORTABLE, 2});
    EXPECT_STRNE(plan.kernel, "");
    EXPECT_STRNE(plan.reason, "");
    EXPECT_GE(plan.tasks, 1);
    EXPECT_LE(plan.tasks, 2);
    EXPECT_GE(plan.num_splits, 1);
  }
  const Plan plan = plan_backward(backward_problem(2000), Machine{FA_CPU_ISA_PORTABLE, 2});
  EXPECT_STRNE(plan.kernel, "");
  EXPECT_STRNE(plan.reason, "");
}

// Forward runs on the unit that multiplies bf16 where q, k and v are bf16, and on tiles also where they are fp16.
TEST(Plan, ForwardOfBf16AndFp16) {
  const struct {
    fa_cpu_isa isa;
    const char *kernel;
    bool fp16;
  } units[] = {{FA_CPU_ISA_AVX512_BF16, "cpu_fwd_tiled_avx512_bf16", false},
               {FA_CPU_ISA_AMX, "cpu_fwd_tiled_amx", true},
               {FA_CPU_ISA_NEON_BF16, "cpu_fwd_tiled_neon_bf16", false}};
  for (const auto &unit : units) {
    ScoredForward p = problem(2000, 2000);
    const std::string vectors = plan_forward(p, Machine{vector_isa(unit.isa), 2}).kernel;
    const std::string best = plan_forward(p, Machine{unit.isa, 2}).kernel;
    EXPECT_EQ(best, vectors);
    if (!has_isa(unit.isa)) continue;  // its kernels may not be built
    for (const Dtype dtype : {Dtype::bf16, Dtype::f16}) {
      const std::string kernel = dtype == Dtype::bf16 || unit.fp16 ? unit.kernel : vectors;
      p.q.dtype = p.k.dtype = p.v.dtype = Dtype::f32;
      for (Operand *x : {&p.q, &p.k, &p.v}) {
        EXPECT_EQ(plan_forward(p, Machine{unit.isa, 2}).kernel, vectors);
        x->dtype = dtype;
      }
      EXPECT_EQ(plan_forward(p, Machine{unit.isa, 2}).kernel, kernel);
    }
  }
}

// Very few queries over int8 run on tiles of bytes. More queries, and those over other bytes, run on tiles of bf16, into which the bytes are widened, if they are
// of that type, and else by fp32 multiply-adds.
TEST(Plan, FewQueriesOverBytesOnAmx) {
  const Machine amx{FA_CPU_ISA_AMX, 2}, avx512{FA_CPU_ISA_AVX512, 2};
  // A plan names kernels that this processor may be unable to run.
  ScoredForward own = problem(2000, 2000);
  own.q.dtype = own.k.dtype = own.v.dtype = Dtype::bf16;
  if (plan_forward(own, amx).kernel != std::string("cpu_fwd_tiled_amx"))
    GTEST_SKIP() << "this build has no kernels for the tile unit";
  if (vector_isa(FA_CPU_ISA_AMX) != FA_CPU_ISA_AVX512) GTEST_SKIP() << "this processor has no AVX-512";
  for (const Dtype q : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    for (const int64_t queries : {1, 2000}) {
      for (const Dtype kv : {Dtype::i8, Dtype::e4m3}) {
        ScoredForward p = problem(queries, 2000);
        p.q.dtype = q;
        p.k.dtype = p.v.dtype = kv;
        const std::string vectors = plan_forward(p, avx512).kernel, mode = queries == 1 ? "vector" : "tiled";
        const bool tiles = q == Dtype::bf16 || (kv == Dtype::i8 && queries == 1);
        EXPECT_EQ(plan_forward(p, amx).kernel, tiles ? "cpu_fwd_" + mode + "_amx" : vectors);
        p.same_bits = true;
        EXPECT_STREQ(plan_forward(p, amx).kernel, plan_forward(p, avx512).kernel);
      }
    }
  }
}

// Queries of 16 bits run on Arm's instructions for these; more than very few of fp16 by fp32 multiply-adds, whatever else is in the call.
TEST(Plan, QueriesOf16BitsOnArm) {
  const struct {
    fa_cpu_isa isa;
    Dtype q, kv;
    const char *few, *many;
  } cases[] = {{FA_CPU_ISA_NEON_BF16, Dtype::bf16, Dtype::bf16, "cpu_fwd_vector_neon_bf16", "cpu_fwd_tiled_neon_bf16"},
               {FA_CPU_ISA_NEON_BF16, Dtype::bf16, Dtype::i8, "cpu_fwd_vector_neon_bf16", "cpu_fwd_tiled_neon_bf16"},
               {FA_CPU_ISA_NEON_BF16, Dtype::bf16, Dtype::e4m3, "cpu_fwd_vector_neon_bf16", "cpu_fwd_tiled_neon_bf16"},
               {FA_CPU_ISA_NEON_FHM, Dtype::f16, Dtype::f16, "cpu_fwd_vector_neon_fhm", "cpu_fwd_tiled_neon"}};
  for (const auto &c : cases) {
    if (!has_isa(c.isa) || (c.q != c.kv && vector_isa(c.isa) != FA_CPU_ISA_NEON)) continue;
    for (const int64_t queries : {1, 2000}) {
      ScoredForward p = problem(queries, 2000);
      p.q.dtype = c.q;
      p.k.dtype = p.v.dtype = c.kv;
      const std::string kernel = plan_forward(p, Machine{c.isa, 2}).kernel;
      EXPECT_EQ(kernel, queries == 1 ? c.few : c.many);
      p.same_bits = true;
      if (c.q != c.kv || c.q == Dtype::f16) {
        const Plan vectors = plan_forward(p, Machine{vector_isa(c.isa), 2});
        EXPECT_STREQ(plan_forward(p, Machine{c.isa, 2}).kernel, vectors.kernel);
      }
      p.same_bits = false;
      p.q.dtype = Dtype::f32;
      EXPECT_STREQ(plan_forward(p, Machine{c.isa, 2}).kernel, plan_forward(p, Machine{vector_isa(c.isa), 2}).kernel);
    }
  }
}

// Backward of bf16 runs on the unit that multiplies bf16, unless something that it does not compute is asked for.
TEST(Plan, BackwardOfBf16) {
  const struct {
    fa_cpu_isa isa;
    const char *kernel;
  } units[] = {{FA_CPU_ISA_AVX512_BF16, "cpu_backward_avx512_bf16"},
               {FA_CPU_ISA_AMX, "cpu_backward_amx"},
               {FA_CPU_ISA_NEON_BF16, "cpu_backward_neon_bf16"}};
  for (const auto &unit : units) {
    if (!has_isa(unit.isa)) continue;  // InstructionSetsOfThisMachine says which there are
    const Machine machine{unit.isa, 2}, vectors{vector_isa(unit.isa), 2};
    ScoredBackward b = backward_problem(2000);
    const Plan fp32 = plan_backward(b, vectors);
    for (Operand *x : {&b.forward.q, &b.forward.k, &b.forward.v, &b.dout}) {
      const Plan plan = plan_backward(b, machine);
      EXPECT_STREQ(plan.kernel, fp32.kernel);
      EXPECT_NE(std::string(plan.reason).find("not all of q, k, v and dout are bf16"), std::string::npos) << plan.reason;
      x->dtype = Dtype::bf16;
    }
    EXPECT_STREQ(plan_backward(b, machine).kernel, unit.kernel);
    EXPECT_STREQ(plan_backward(b, vectors).kernel, fp32.kernel);
    b.forward.softcap = 1;
    b.forward.q_lengths.max_len = 1;
    EXPECT_STREQ(plan_backward(b, machine).kernel, unit.kernel);
    b.dbias.data = &unreadable;
    const Plan plan = plan_backward(b, machine);
    EXPECT_STREQ(plan.kernel, fp32.kernel);
    EXPECT_NE(std::string(plan.reason).find("dbias"), std::string::npos) << plan.reason;
  }
}

TEST(Plan, SameQuestionSameAnswer) {
  const Plan a = plan_forward(problem(300, 400), Machine{best_isa(), 3});
  const Plan b = plan_forward(problem(300, 400), Machine{best_isa(), 3});
  EXPECT_STREQ(a.kernel, b.kernel);
  EXPECT_EQ(a.workspace_bytes, b.workspace_bytes);
  EXPECT_EQ(a.num_splits, b.num_splits);
}

// Results do not depend on threads, so neither may the split of keys.
TEST(Plan, SplitsDoNotDependOnThreads) {
  for (const int64_t seqlen_k : {1, 100, 5000, 100000}) {
    const int32_t splits = plan_forward(problem(1, seqlen_k), Machine{best_isa(), 1}).num_splits;
    for (const int32_t threads : {2, 3, 64}) {
      EXPECT_EQ(plan_forward(problem(1, seqlen_k), Machine{best_isa(), threads}).num_splits, splits) << seqlen_k;
    }
  }
}

// Four times the length takes at most about four times the workspace, never sixteen.
TEST(Plan, WorkspaceGrowsAtMostLinearly) {
  const Machine machine{best_isa(), 2};
  for (const int64_t seqlen : {2048, 8192, 32768}) {
    const size_t forward = plan_forward(problem(seqlen, seqlen), machine).workspace_bytes;
    EXPECT_LE(plan_forward(problem(4 * seqlen, 4 * seqlen), machine).workspace_bytes, 5 * forward + 4096);
    const size_t backward = plan_backward(backward_problem(seqlen), machine).workspace_bytes;
    EXPECT_LE(plan_backward(backward_problem(4 * seqlen), machine).workspace_bytes, 5 * backward + 4096);
  }
}

TEST(Plan, InstructionSetsOfThisMachine) {
  EXPECT_TRUE(has_isa(FA_CPU_ISA_PORTABLE));
  EXPECT_TRUE(has_isa(best_isa()));
  EXPECT_FALSE(has_isa(12345));
}

}  // namespace
}  // namespace fa::cpu
