// SPDX-License-Identifier: Apache-2.0
// Kernels with a score text, compiled by NVRTC where the machine has it; the compiler's messages; and the cache of compiled kernels.
#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "cuda/common/score_text.h"
#include "cuda/host/kernel_cache.h"
#include "cuda/host/nvrtc.h"
#include "cuda/host/registry.h"
#include "cuda/host/score_kernels.h"
#include "cuda/host/score_program.h"
#include "cuda/host/sha256.h"

namespace fa::cuda {
namespace {

bool has_nvrtc() {
  for (const char *name :
       {"libnvrtc.so.13", "libnvrtc.so.12", "/usr/local/cuda/lib64/libnvrtc.so.13", "/usr/local/cuda/lib64/libnvrtc.so.12"}) {
    if (dlopen(name, RTLD_NOW | RTLD_LOCAL) != nullptr) return true;
  }
  return false;
}

class ScorePrograms : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_nvrtc()) GTEST_SKIP() << "this machine has no NVRTC";
  }

  fa_status compile(const ScoreProgram &program, const std::string &text, CompiledCode &code) {
    ScoreCall call;
    call.source.text = text.c_str();
    call.source.text_length = text.size();
    call.text = scan_score_text(text);
    call.aux.num_tensors = 2;
    for (int n = 0; n < 2; ++n) {
      call.tensors[n].dtype = n == 0 ? FA_FLOAT32 : FA_INT32;
      call.tensors[n].ndim = 4;
      call.access[n] = FA_SCORE_BY_HEAD | FA_SCORE_BY_KEY;
    }
    if ((program.scores & kTileBias) != 0) {
      call.tensors[0].dtype = program.dtype == Dtype::bf16 ? FA_BFLOAT16 : FA_FLOAT16;
      call.access[0] |= FA_SCORE_BY_QUERY;
      call.tile_tensor = 0;
    }
    const std::string header = score_text_header(call, program.exact());
    Device device;
    device.compute_capability = 90;
    CompileJob job;
    job.text = source_of(program);
    job.headers = {{"cuda/common/score_text_of_program.h", header.c_str()}};
    job.arch = arch_of(program, device);
    job.exact = program.exact();
    return cuda::compile(job, code, error_);
  }
  // The forward kernel of Hopper for head_dim 64.
  static ScoreProgram some_program() {
    ScoreProgram program;
    program.family = Family::sm90;
    program.dtype = Dtype::bf16;
    for (const KernelRow &row : kernels_of(Family::sm90, Pass::forward)) {
      if (std::string(row.name) == "d64r") program.shape = row.shape;
    }
    return program;
  }

  ErrorText error_;
};

const char *const kScores =
    "template <class real> real score(real s, const Position &p, const Aux &aux) {\n"
    "  return real(aux.scalars[0]) * std::tanh(s * of_pair(aux, 0, p));\n"
    "}\n";
const char *const kMasks =
    "bool visible(const Position &p, const Aux &aux) { return of_pair(aux, 1, p) != 0 || std::abs(diagonal(p) - p.j) < 9; }\n"
    "fa_score_tile tile(const Position &p, int64_t queries, int64_t keys, const Aux &) {\n"
    "  return p.i > p.j + queries + keys ? FA_SCORE_TILE_EMPTY : FA_SCORE_TILE_PARTIAL;\n"
    "}\n";

// Every kernel that a plan may take. Hopper's must not wait for each wgmma, and must not move many registers to memory.
TEST_F(ScorePrograms, EveryKernelCompiles) {
  for (const Family family : {Family::sm90, Family::sm80, Family::simt}) {
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      for (const KernelRow &row : kernels_of(family, pass)) {
        if ((row.scores & kScoreText) == 0) continue;
        // One of both 16-bit types, and of CUDA cores one of all sizes.
        if (family == Family::simt && std::string(row.name) != "d128") continue;
        const bool masked = (row.scores & kDataMask) != 0;
        ScoreProgram program;
        program.family = family;
        program.pass = pass;
        program.shape = row.shape;
        program.dtype = row.shape % 2 != 0 ? Dtype::bf16 : Dtype::f16;
        if (masked) program.scores |= kMasked;
        if (family == Family::sm90 && (row.scores & kTileBias) != 0) program.scores |= kTileBias;  // it stages a tensor
        // The rarer ways to store rows, in some.
        program.vector_rows = row.shape % 3 != 0;
        program.fp32_rows = pass == Pass::backward && row.shape % 3 == 1;
        CompiledCode code;
        ASSERT_EQ(compile(program, masked ? std::string(kScores) + kMasks : kScores, code), FA_OK)
            << row.name << ": " << error_.text;
        EXPECT_FALSE(code.serialised) << row.name;
        EXPECT_GT(code.registers, 0);
        EXPECT_LE(code.spill_bytes, 1024) << row.name;
        EXPECT_FALSE(code.cubin.empty());
      }
    }
  }
  for (const ScoreProgram::Kernel kernel : {ScoreProgram::Kernel::cell_map, ScoreProgram::Kernel::dbias}) {
    ScoreProgram program;
    program.kernel = kernel;
    CompiledCode code;
    ASSERT_EQ(compile(program, std::string(kScores) + kMasks, code), FA_OK) << error_.text;
    ASSERT_EQ(compile(program, kMasks, code), FA_OK) << error_.text;
  }
}

// How elements of score tensors may be loaded.
TEST(ScoreTensors, Layouts) {
  alignas(16) static const unsigned char memory[64] = {};
  struct {
    const char *what;
    fa_dtype dtype;
    int offset;
    std::vector<int64_t> shape, stride;
    uint32_t access, layout;
  } const cases[] = {
      {"a bias",
       FA_BFLOAT16,
       0,
       {1, 4, 100, 300},
       {0, 30000, 300, 1},
       FA_SCORE_BY_HEAD | FA_SCORE_BY_QUERY | FA_SCORE_BY_KEY,
       kLayoutUnit | kLayoutPairs | kLayoutSmall},
      {"in fp32",
       FA_FLOAT32,
       0,
       {1, 4, 100, 300},
       {0, 30000, 300, 1},
       FA_SCORE_BY_ANY,
       kLayoutUnit | kLayoutPairs | kLayoutSmall},
      {"by keys", FA_INT32, 0, {1, 1, 1, 300}, {0, 0, 0, 1}, FA_SCORE_BY_KEY, kLayoutUnit | kLayoutPairs | kLayoutSmall},
      {"an odd address", FA_BFLOAT16, 2, {1, 4, 100, 300}, {0, 30000, 300, 1}, FA_SCORE_BY_ANY, kLayoutUnit | kLayoutSmall},
      {"an odd row", FA_BFLOAT16, 0, {1, 4, 100, 300}, {0, 30100, 301, 1}, FA_SCORE_BY_ANY, kLayoutUnit | kLayoutSmall},
      {"an odd number of keys",
       FA_BFLOAT16,
       0,
       {1, 4, 100, 299},
       {0, 30000, 300, 1},
       FA_SCORE_BY_ANY,
       kLayoutUnit | kLayoutSmall},
      {"bytes", FA_INT8, 0, {1, 4, 100, 300}, {0, 30000, 300, 1}, FA_SCORE_BY_ANY, kLayoutUnit | kLayoutSmall},
      {"a table of a head", FA_FLOAT32, 0, {4, 300}, {300, 1}, FA_SCORE_BY_ANY, kLayoutUnit | kLayoutSmall},
      {"every second key", FA_FLOAT32, 0, {1, 4, 100, 300}, {0, 60000, 600, 2}, FA_SCORE_BY_ANY, kLayoutSmall},
      {"backwards",
       FA_FLOAT32,
       0,
       {1, 4, 1000, 300},
       {0, 3000000, -300000, 1},
       FA_SCORE_BY_ANY,
       kLayoutUnit | kLayoutPairs | kLayoutSmall},
      {"far", FA_FLOAT32, 0, {1, 4, 10000, 300}, {0, 3000000, -300000, 1}, FA_SCORE_BY_ANY, kLayoutUnit | kLayoutPairs},
      {"one element", FA_FLOAT32, 0, {1}, {0}, FA_SCORE_BY_ANY, kLayoutSmall},
  };
  for (const auto &c : cases) {
    ScoreCall call;
    fa_tensor &t = call.tensors[0];
    t.data = const_cast<unsigned char *>(memory) + c.offset;
    t.dtype = c.dtype;
    t.ndim = static_cast<int32_t>(c.shape.size());
    std::copy(c.shape.begin(), c.shape.end(), t.shape);
    std::copy(c.stride.begin(), c.stride.end(), t.stride);
    call.access[0] = c.access;
    EXPECT_EQ(tensor_layout(call, 0), c.layout) << c.what;
  }
}

TEST_F(ScorePrograms, ErrorsNameLineAndColumn) {
  CompiledCode code;
  EXPECT_EQ(
      compile(some_program(),
              "template <class real>\nreal score(real s, const Position &p, const Aux &aux) {\n  return s + nothing;\n}\n",
              code),
      FA_ERROR_INVALID_ARGUMENT);
  EXPECT_STREQ(error_.text, "score text, line 3, column 14: identifier \"nothing\" is undefined");
}

TEST_F(ScorePrograms, ErrorsOfTheCallAreToldApart) {
  CompiledCode code;
  EXPECT_EQ(compile(some_program(), "template <class real>\nreal score(real s) {\n  return s;\n}\n", code),
            FA_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error_.text).find("the library's kernel does not compile with the score text"), std::string::npos)
      << error_.text;
}

// A driver that loads whatever it gets, and counts.
struct CountingDriver : Driver {
  static inline int loaded = 0, unloaded = 0;
  static inline CUresult result = CUDA_SUCCESS;

  CountingDriver() {
    loaded = unloaded = 0;
    result = CUDA_SUCCESS;
    cuThreadExchangeStreamCaptureMode = [](CUstreamCaptureMode *) { return CUDA_SUCCESS; };
    cuLibraryLoadData = [](CUlibrary *library, const void *, CUjit_option *, void **, unsigned, CUlibraryOption *, void **,
                           unsigned) {
      *library = reinterpret_cast<CUlibrary>(static_cast<uintptr_t>(++loaded));
      return result;
    };
    cuLibraryGetKernel = [](CUkernel *kernel, CUlibrary library, const char *name) {
      EXPECT_STREQ(name, kScoreKernel);
      *kernel = reinterpret_cast<CUkernel>(library);
      return CUDA_SUCCESS;
    };
    cuLibraryUnload = [](CUlibrary) {
      ++unloaded;
      return CUDA_SUCCESS;
    };
  }
};

// One compilation serves all contexts of the process; another process finds it on disk.
TEST_F(ScorePrograms, KernelsAreMadeOnce) {
  const CountingDriver driver;
  Device device;
  device.compute_capability = 90;
  const auto call_of = [](const std::string &text) {
    ScoreCall call;
    call.source.text = text.c_str();
    call.source.text_length = text.size();
    call.text = scan_score_text(text);
    return call;
  };
  const std::string text = std::string(kMasks) + "// " + std::to_string(getpid());
  const ScoreCall call = call_of(text);
  ScoreProgram program;
  program.kernel = ScoreProgram::Kernel::cell_map;
  ScoreKernel first, again, elsewhere;
  ScoreKernels kernels(driver, device, ""), others(driver, device, "");
  EXPECT_EQ(kernels.find(call, program), nullptr);
  ASSERT_EQ(kernels.get(call, program, first, error_), FA_OK) << error_.text;
  ASSERT_NE(kernels.find(call, program), nullptr);
  EXPECT_EQ(kernels.find(call, program)->handle, first.handle);
  EXPECT_EQ(first.spill_bytes, 0);
  ASSERT_EQ(kernels.get(call, program, again, error_), FA_OK) << error_.text;
  ASSERT_EQ(others.get(call_of(text), program, elsewhere, error_), FA_OK) << error_.text;
  EXPECT_EQ(again.handle, first.handle);
  EXPECT_EQ(elsewhere.handle, first.handle);
  EXPECT_EQ(driver.loaded, 1);
  // The tensor that a kernel stages is a constant of its program.
  ScoreCall staged = call;
  staged.tile_tensor = 1;
  ScoreProgram forward = some_program();
  ScoreKernel reads, stages;
  ASSERT_EQ(kernels.get(call, forward, reads, error_), FA_OK) << error_.text;
  ASSERT_EQ(kernels.get(staged, forward, stages, error_), FA_OK) << error_.text;
  EXPECT_NE(reads.handle, stages.handle);
  CountingDriver::loaded = 1;
  // Another text, and a driver that refuses it.
  CountingDriver::result = CUDA_ERROR_NO_BINARY_FOR_GPU;
  const std::string other = text + "\n";
  EXPECT_EQ(kernels.get(call_of(other), program, again, error_), FA_ERROR_CUDA);
  EXPECT_NE(std::string(error_.text).find("cudaErrorNoKernelImageForDevice"), std::string::npos) << error_.text;
  EXPECT_EQ(driver.loaded, 2);
  CountingDriver::result = CUDA_SUCCESS;
  EXPECT_EQ(kernels.get(call_of(other), program, again, error_), FA_OK) << error_.text;
  EXPECT_NE(again.handle, first.handle);
  // A text with an error is compiled again when it is asked for again.
  const std::string wrong = "bool visible(const Position &p, const Aux &) { return q; }";
  EXPECT_EQ(kernels.get(call_of(wrong), program, again, error_), FA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(kernels.find(call_of(wrong), program), nullptr);
}

// What compile() says beside an NVRTC that the environment names, in a process of its own.
void expect_with_nvrtc(const char *library, const std::vector<std::pair<const char *, const char *>> &environment,
                       fa_status status, const std::string &text) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        setenv("FLASHATTN_NVRTC", library, 1);
        for (const auto &[name, value] : environment) setenv(name, value, 1);
        CompileJob job;
        job.arch = "sm_90a";
        CompiledCode code;
        ErrorText error;
        const fa_status got = compile_with_text(job, code, error);
        std::fprintf(stderr, "%d: %s%s%s%s", int{got}, error.text, code.cubin.c_str(), code.serialised ? ", serialised" : "",
                     code.alone ? ", alone" : "");
        std::exit(got == status ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), text);
}

TEST(Nvrtc, AnyFailureHasAStatusAndASentence) {
  const char *const fake = FA_FAKE_NVRTC;
  expect_with_nvrtc(fake, {}, FA_OK, "0: code");
  // Texts with which ptxas serialises wgmma are compiled again, to run while none does.
  const char *const serialised = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized";
  expect_with_nvrtc(fake, {{"FAKE_NVRTC_LOG", serialised}}, FA_OK, "0: code, alone$");
  expect_with_nvrtc(fake, {{"FAKE_NVRTC_LOG", serialised}, {"FAKE_NVRTC_LOG_ALONE", serialised}}, FA_OK,
                    "0: code, serialised$");
  expect_with_nvrtc("/nonexistent/libnvrtc.so", {}, FA_ERROR_NOT_BUILT, "FLASHATTN_NVRTC names /nonexistent/libnvrtc.so");
  expect_with_nvrtc(FA_INCOMPLETE_NVRTC, {}, FA_ERROR_NOT_BUILT, "has no nvrtcDestroyProgram");
  expect_with_nvrtc(fake, {{"FAKE_NVRTC_VERSION", "11.8"}}, FA_ERROR_NOT_BUILT, "version 11.8; score texts need 12.0");
  expect_with_nvrtc(fake, {{"FAKE_NVRTC_RESULT", "1"}}, FA_ERROR_OUT_OF_MEMORY, "no memory");
  expect_with_nvrtc(fake, {{"FAKE_NVRTC_RESULT", "5"}, {"FAKE_NVRTC_VERSION", "12.3"}}, FA_ERROR_NOT_BUILT,
                    "NVRTC 12.3 does not compile for sm_90a");
  expect_with_nvrtc(fake,
                    {{"FAKE_NVRTC_RESULT", "6"}, {"FAKE_NVRTC_LOG", "score(7): error: no such thing\n  a + b\n      ^\n"}},
                    FA_ERROR_INVALID_ARGUMENT, "score text, line 7, column 5: no such thing");
  expect_with_nvrtc(fake, {{"FAKE_NVRTC_RESULT", "6"}}, FA_ERROR_INVALID_ARGUMENT, "does not say why");
  expect_with_nvrtc(fake, {{"FAKE_NVRTC_RESULT", "7"}}, FA_ERROR_NOT_BUILT, "does not find libnvrtc-builtins.so.13.0");
  expect_with_nvrtc(fake, {{"FAKE_NVRTC_RESULT", "11"}}, FA_ERROR_CUDA, "NVRTC 13.0: a fake failure");
}

TEST(CompilerLog, SaysWhatBecameOfTheCode) {
  CompiledCode code;
  read_log(
      "ptxas info    : Compiling entry function 'x' for 'sm_90a'\n"
      "ptxas         .     8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads\n"
      "ptxas info    : Used 168 registers, used 16 barriers\n",
      code);
  EXPECT_EQ(code.registers, 168);
  EXPECT_EQ(code.spill_bytes, 12);
  EXPECT_FALSE(code.serialised);
  for (const char *line :
       {"ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma "
        "instructions defining accumulator registers of a wgmma",
        "ptxas info : (C7507) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum register requirements."}) {
    CompiledCode slow;
    read_log(line, slow);
    EXPECT_TRUE(slow.serialised) << line;
    EXPECT_EQ(slow.registers, -1);
  }
}

TEST(Sha256Test, KnownDigests) {
  const auto digest = [](std::string_view bytes) {
    Sha256 hash;
    hash.add(bytes);
    return hex(hash.digest());
  };
  EXPECT_EQ(digest(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(digest("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(digest("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(digest(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

class KernelCacheTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "flashattn-cache-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
    directory_ = root_ / "a" / "cache";
  }
  void TearDown() override {
    std::error_code ignored;
    std::filesystem::permissions(directory_, std::filesystem::perms::owner_all, ignored);
    std::filesystem::remove_all(root_, ignored);
  }
  KernelCache cache() const { return KernelCache(directory_.c_str()); }
  std::string stored() const {
    cache().store(key_, code_);
    return (directory_ / key_).string();
  }
  bool found() const {
    CompiledCode code;
    if (!cache().find(key_, code)) return false;
    EXPECT_EQ(code.cubin, code_.cubin);
    EXPECT_EQ(code.registers, code_.registers);
    EXPECT_EQ(code.spill_bytes, code_.spill_bytes);
    EXPECT_EQ(code.serialised, code_.serialised);
    EXPECT_EQ(code.alone, code_.alone);
    return true;
  }
  static std::string contents(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // Writes a file as private as the cache's own.
  static void replace(const std::string &path, const std::string &bytes) {
    unlink(path.c_str());
    std::ofstream(path, std::ios::binary) << bytes;
    chmod(path.c_str(), 0600);
  }

  std::filesystem::path root_, directory_;
  const std::string key_ = kernel_cache_key({"one", "two"});
  const CompiledCode code_{std::string(5000, 'x') + "end", 168, 12, false, true};
};

TEST_F(KernelCacheTest, FindsWhatItStored) {
  EXPECT_FALSE(found());
  const std::string path = stored();
  EXPECT_TRUE(found());
  struct stat file, folder;
  ASSERT_EQ(stat(path.c_str(), &file), 0);
  ASSERT_EQ(stat(directory_.c_str(), &folder), 0);
  EXPECT_EQ(file.st_mode & 0777, 0600u);
  EXPECT_EQ(folder.st_mode & 0777, 0700u);
}

TEST_F(KernelCacheTest, KeysTellPartsApart) {
  EXPECT_NE(kernel_cache_key({"ab", "c"}), kernel_cache_key({"a", "bc"}));
  EXPECT_NE(kernel_cache_key({"ab"}), kernel_cache_key({"ab", ""}));
  EXPECT_EQ(kernel_cache_key({"ab"}).size(), 64u);
}

TEST_F(KernelCacheTest, DamagedFilesAreNotThere) {
  const std::string path = stored(), whole = contents(path);
  for (size_t size = 0; size < whole.size(); size += size < 200 ? 1 : 97) {
    replace(path, whole.substr(0, size));
    EXPECT_FALSE(found()) << size;
  }
  for (size_t at = 0; at < whole.size(); at += 97) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 4);
    replace(path, damaged);
    EXPECT_FALSE(found()) << at;
  }
  replace(path, whole + "x");
  EXPECT_FALSE(found());
  replace(path, whole);
  EXPECT_TRUE(found());
  // A later call replaces it.
  replace(path, "nothing");
  stored();
  EXPECT_TRUE(found());
}

TEST_F(KernelCacheTest, ForeignFilesAreNotThere) {
  const std::string path = stored(), whole = contents(path), other = kernel_cache_key({"other"});
  replace((directory_ / other).string(), whole);
  CompiledCode code;
  EXPECT_FALSE(cache().find(other, code));
  unlink(path.c_str());
  ASSERT_EQ(symlink((directory_ / other).c_str(), path.c_str()), 0);
  EXPECT_FALSE(found());
  unlink(path.c_str());
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_FALSE(found());
  unlink(path.c_str());
  replace(path, whole);
  chmod(path.c_str(), 0644);
  EXPECT_FALSE(found());
}

TEST_F(KernelCacheTest, OpenFoldersAreNotUsed) {
  stored();
  for (const mode_t mode : {0777, 0750, 0701}) {
    chmod(directory_.c_str(), mode);
    EXPECT_FALSE(found());
    stored();
    EXPECT_FALSE(found());
  }
  chmod(directory_.c_str(), 0700);
  EXPECT_TRUE(found());
  const std::filesystem::path moved = root_ / "moved";
  std::filesystem::rename(directory_, moved);
  std::filesystem::create_directory_symlink(moved, directory_);
  EXPECT_FALSE(found());
}

TEST_F(KernelCacheTest, WithoutARoomItStoresNothing) {
  std::filesystem::create_directories(directory_.parent_path());
  std::ofstream(directory_.string()) << "a file";
  stored();
  EXPECT_FALSE(found());
  CompiledCode code;
  setenv("FLASHATTN_KERNEL_CACHE", "off", 1);
  const KernelCache off(nullptr);
  unsetenv("FLASHATTN_KERNEL_CACHE");
  off.store(key_, code_);
  EXPECT_FALSE(off.find(key_, code));
  const KernelCache none("");
  none.store(key_, code_);
  EXPECT_FALSE(none.find(key_, code));
}

TEST_F(KernelCacheTest, TheEnvironmentNamesTheFolder) {
  setenv("FLASHATTN_KERNEL_CACHE", directory_.c_str(), 1);
  const KernelCache named(nullptr);
  unsetenv("FLASHATTN_KERNEL_CACHE");
  named.store(key_, code_);
  EXPECT_TRUE(found());
}

TEST_F(KernelCacheTest, ManyAtOnce) {
  std::vector<std::thread> threads;
  for (int n = 0; n < 8; ++n)
    threads.emplace_back([&] {
      for (int turn = 0; turn < 20; ++turn) {
        CompiledCode code;
        EXPECT_TRUE(!cache().find(key_, code) || code.cubin == code_.cubin);
        cache().store(key_, code_);
      }
    });
  for (std::thread &thread : threads) thread.join();
  EXPECT_TRUE(found());
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory_), {}), 1);  // no file that is half written
}

}  // namespace
}  // namespace fa::cuda
