// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/nvrtc.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>
#include <sstream>

namespace fa::cuda {
namespace {

// nvrtc.h, as far as it is needed; it has not changed since CUDA 11.
using Program = struct _nvrtcProgram *;
using Result = int;
constexpr Result kSuccess = 0, kOutOfMemory = 1, kInvalidOption = 5, kCompilation = 6, kBuiltinFailure = 7;
#define FA_NVRTC_FUNCTIONS(X)                                                                                         \
  X(nvrtcVersion, Result(int *, int *))                                                                               \
  X(nvrtcGetErrorString, const char *(Result))                                                                        \
  X(nvrtcCreateProgram, Result(Program *, const char *, const char *, int, const char *const *, const char *const *)) \
  X(nvrtcCompileProgram, Result(Program, int, const char *const *))                                                   \
  X(nvrtcGetProgramLogSize, Result(Program, size_t *))                                                                \
  X(nvrtcGetProgramLog, Result(Program, char *))                                                                      \
  X(nvrtcGetCUBINSize, Result(Program, size_t *))                                                                     \
  X(nvrtcGetCUBIN, Result(Program, char *))                                                                           \
  X(nvrtcDestroyProgram, Result(Program *))

struct Nvrtc {
#define FA_MEMBER(name, ...) std::add_pointer_t<__VA_ARGS__> name = nullptr;
  FA_NVRTC_FUNCTIONS(FA_MEMBER)
#undef FA_MEMBER
  int version = 0;      // major * 1000 + minor
  std::string missing;  // why there is none
};

constexpr const char *kVariable = "FLASHATTN_NVRTC";
constexpr const char *kNames[] = {"libnvrtc.so.13", "libnvrtc.so.12"};
constexpr const char *kFolders[] = {"", "/usr/local/cuda/lib64/"};

// One that the process has already, then the one that the environment names, then those of the system.
void *open_library(std::string &missing) {
  if (const char *path = ::secure_getenv(kVariable); path != nullptr && *path != '\0') {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) missing = std::string(kVariable) + " names " + path + ", which cannot be loaded: " + dlerror();
    return library;
  }
  for (const char *name : kNames) {
    if (void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)) return library;
  }
  for (const char *folder : kFolders) {
    for (const char *name : kNames) {
      if (void *library = dlopen((std::string(folder) + name).c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    }
  }
  missing =
      "a score text has to be compiled, and there is no NVRTC (libnvrtc.so.13 or libnvrtc.so.12): install it with the CUDA "
      "toolkit or as the "
      "package nvidia-cuda-nvrtc, or let FLASHATTN_NVRTC name it";
  return nullptr;
}

Nvrtc load() {
  Nvrtc nvrtc;
  void *library = open_library(nvrtc.missing);
  if (library == nullptr) return nvrtc;
  const auto find = [&](const char *name, auto &function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) nvrtc.missing = std::string("the NVRTC that is loaded has no ") + name;
  };
#define FA_FIND(name, ...) find(#name, nvrtc.name);
  FA_NVRTC_FUNCTIONS(FA_FIND)
#undef FA_FIND
  if (!nvrtc.missing.empty()) return nvrtc;
  int major = 0, minor = 0;
  if (nvrtc.nvrtcVersion(&major, &minor) != kSuccess || major < 12) {
    nvrtc.missing = "NVRTC is version " + std::to_string(major) + "." + std::to_string(minor) + "; score texts need 12.0";
  }
  if (!nvrtc.missing.empty()) return nvrtc;
  nvrtc.version = major * 1000 + minor;
  // Wheels of CUDA 13 do not say where their builtins are: those beside the library are loaded first.
  Dl_info info;
  if (dladdr(reinterpret_cast<void *>(nvrtc.nvrtcVersion), &info) != 0 && info.dli_fname != nullptr) {
    const std::string path = info.dli_fname;
    dlopen((path.substr(0, path.rfind('/') + 1) + "libnvrtc-builtins.so." + std::to_string(major) + "." + std::to_string(minor))
               .c_str(),
           RTLD_NOW | RTLD_LOCAL);
  }
  return nvrtc;
}

// Destroys a program at the end of its scope.
struct OwnedProgram {
  const Nvrtc &nvrtc;
  Program program = nullptr;
  ~OwnedProgram() {
    if (program != nullptr) nvrtc.nvrtcDestroyProgram(&program);
  }
};

fa_status explain(const Nvrtc &nvrtc, const CompileJob &job, Result result, const std::string &log, ErrorText &error) {
  const int major = nvrtc.version / 1000, minor = nvrtc.version % 1000;
  switch (result) {
    case kCompilation: {
      const std::string first = first_error(log);
      return fail(error, FA_ERROR_INVALID_ARGUMENT, "%s",
                  first.empty() ? "the score text does not compile, and the compiler does not say why" : first.c_str());
    }
    case kOutOfMemory:
      return fail(error, FA_ERROR_OUT_OF_MEMORY, "no memory to compile a score text");
    case kInvalidOption:
      return fail(error, FA_ERROR_NOT_BUILT, "NVRTC %d.%d does not compile for %s; a newer one may", major, minor,
                  job.arch.c_str());
    case kBuiltinFailure:
      return fail(error, FA_ERROR_NOT_BUILT, "NVRTC %d.%d does not find libnvrtc-builtins.so.%d.%d, which belongs beside it",
                  major, minor, major, minor);
    default:
      return fail(error, FA_ERROR_CUDA, "NVRTC %d.%d: %s", major, minor, nvrtc.nvrtcGetErrorString(result));
  }
}

fa_status compile_here(const Nvrtc &nvrtc, const CompileJob &job, CompiledCode &code, ErrorText &error) {
  const auto check = [&](Result result, const char *what) {
    return result == kSuccess ? FA_OK : fail(error, FA_ERROR_CUDA, "NVRTC: %s: %s", what, nvrtc.nvrtcGetErrorString(result));
  };
  std::vector<const char *> names, texts;
  const auto add = [&](const SourceText &source) {
    names.push_back(source.name);
    texts.push_back(source.text);
  };
  for (const SourceText &source : embedded_sources()) add(source);
  for (const SourceText &source : job.headers) add(source);
  OwnedProgram owned{nvrtc};
  FA_RETURN_IF_ERROR(check(nvrtc.nvrtcCreateProgram(&owned.program, job.text.c_str(), "kernel.cu",
                                                    static_cast<int>(names.size()), texts.data(), names.data()),
                           "program"));
  const std::string arch = "-arch=" + job.arch;
  std::vector<const char *> options = {arch.c_str(), "-std=c++17", "-default-device", "--ptxas-options=-v"};
  if (!job.exact) options.push_back("--use_fast_math");
  if (nvrtc.version >= 12009) options.push_back("--no-cache");  // NVRTC's own cache, which loses the log
  const Result result = nvrtc.nvrtcCompileProgram(owned.program, static_cast<int>(options.size()), options.data());
  size_t size = 0;
  std::string log;
  if (nvrtc.nvrtcGetProgramLogSize(owned.program, &size) == kSuccess && size > 1) {
    log.resize(size);
    if (nvrtc.nvrtcGetProgramLog(owned.program, log.data()) != kSuccess) log.clear();
  }
  if (result != kSuccess) return explain(nvrtc, job, result, log, error);
  read_log(log, code);
  FA_RETURN_IF_ERROR(check(nvrtc.nvrtcGetCUBINSize(owned.program, &size), "code"));
  code.cubin.resize(size);
  return check(nvrtc.nvrtcGetCUBIN(owned.program, code.cubin.data()), "code");
}

struct Task {
  const CompileJob &job;
  CompiledCode &code;
  ErrorText &error;
  fa_status status = FA_OK;
};

void *run(void *argument) {
  Task &task = *static_cast<Task *>(argument);
  try {
    static Nvrtc nvrtc;  // compile() lets one thread in at a time
    if (nvrtc.version == 0) nvrtc = load();
    task.status = nvrtc.missing.empty() ? compile_here(nvrtc, task.job, task.code, task.error)
                                        : fail(task.error, FA_ERROR_NOT_BUILT, "%s", nvrtc.missing.c_str());
  } catch (const std::bad_alloc &) {
    task.status = fail(task.error, FA_ERROR_OUT_OF_MEMORY, "no memory to compile a score text");
  }
  return nullptr;
}

// The number that stands before `unit` in a line.
int32_t number_before(const std::string &line, const std::string &unit) {
  size_t end = line.find(unit);
  if (end == std::string::npos || end == 0) return -1;
  size_t begin = end;
  while (begin > 0 && line[begin - 1] >= '0' && line[begin - 1] <= '9') --begin;
  return begin == end ? -1 : static_cast<int32_t>(std::strtol(line.c_str() + begin, nullptr, 10));
}

}  // namespace

// In a thread of its own: NVRTC needs more stack than the threads of some hosts have.
fa_status compile(const CompileJob &job, CompiledCode &code, ErrorText &error) {
  constexpr size_t kStack = size_t{16} << 20;
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  Task task{job, code, error};
  pthread_attr_t attributes;
  pthread_t thread;
  if (pthread_attr_init(&attributes) != 0) return fail(error, FA_ERROR_OUT_OF_MEMORY, "no thread to compile a score text in");
  pthread_attr_setstacksize(&attributes, kStack);
  const int failed = pthread_create(&thread, &attributes, run, &task);
  pthread_attr_destroy(&attributes);
  if (failed != 0) return fail(error, FA_ERROR_OUT_OF_MEMORY, "no thread to compile a score text in");
  pthread_join(thread, nullptr);
  return task.status;
}

fa_status compile_with_text(const CompileJob &job, CompiledCode &code, ErrorText &error) {
  FA_RETURN_IF_ERROR(compile(job, code, error));
  if (!code.serialised) return FA_OK;
  CompileJob again = job;
  again.text = "#define FA_TEXT_ALONE 1\n" + job.text;
  CompiledCode alone;
  FA_RETURN_IF_ERROR(compile(again, alone, error));
  if (alone.serialised) return FA_OK;
  code = std::move(alone);
  code.alone = true;
  return FA_OK;
}

void read_log(const std::string &log, CompiledCode &code) {
  std::istringstream lines(log);
  for (std::string line; std::getline(lines, line);) {
    if (const int32_t n = number_before(line, " bytes spill stores"); n >= 0) code.spill_bytes = std::max(code.spill_bytes, n);
    if (const int32_t n = number_before(line, " registers"); n >= 0) code.registers = std::max(code.registers, n);
    code.serialised |= line.find("serialized") != std::string::npos || line.find("'setmaxnreg' ignored") != std::string::npos;
  }
}

std::string first_error(const std::string &log) {
  std::istringstream lines(log);
  for (std::string line; std::getline(lines, line);) {
    const size_t at = line.find("): error: ");
    if (at == std::string::npos) continue;
    const size_t open = line.rfind('(', at);
    if (open == std::string::npos) continue;
    const std::string file = line.substr(0, open), number = line.substr(open + 1, at - open - 1),
                      message = line.substr(at + 10);
    if (file != "score") return "the library's kernel does not compile with the score text (" + line + ")";
    // The line in question follows, indented by two, and below it a caret at the column.
    std::string source, caret;
    std::getline(lines, source);
    std::getline(lines, caret);
    const size_t column = caret.find('^');
    return "score text, line " + number +
           (column == std::string::npos ? "" : ", column " + std::to_string(column - std::min<size_t>(column, 2) + 1)) + ": " +
           message;
  }
  return "";
}

}  // namespace fa::cuda
