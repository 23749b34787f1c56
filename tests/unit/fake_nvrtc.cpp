// SPDX-License-Identifier: Apache-2.0
// An NVRTC that does what the environment says: FAKE_NVRTC_VERSION "major.minor"; FAKE_NVRTC_RESULT, what nvrtcCompileProgram() returns;
// FAKE_NVRTC_LOG, its log, and FAKE_NVRTC_LOG_ALONE that of programs whose text runs alone. Its code is the word "code".
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

const char *variable(const char *name, const char *otherwise) {
  const char *value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

const char *log_variable = "FAKE_NVRTC_LOG";
constexpr char kCode[] = {'c', 'o', 'd', 'e'};

}  // namespace

extern "C" {

int nvrtcVersion(int *major, int *minor) {
  return std::sscanf(variable("FAKE_NVRTC_VERSION", "13.0"), "%d.%d", major, minor) == 2 ? 0 : 11;
}
const char *nvrtcGetErrorString(int) { return "a fake failure"; }
int nvrtcCreateProgram(void **program, const char *text, const char *, int, const char *const *, const char *const *) {
  *program = std::malloc(1);
  log_variable = std::strstr(text, "FA_TEXT_ALONE") != nullptr ? "FAKE_NVRTC_LOG_ALONE" : "FAKE_NVRTC_LOG";
  return 0;
}
int nvrtcCompileProgram(void *, int, const char *const *) { return std::atoi(variable("FAKE_NVRTC_RESULT", "0")); }
int nvrtcGetProgramLogSize(void *, size_t *size) {
  *size = std::strlen(variable(log_variable, "")) + 1;
  return 0;
}
int nvrtcGetProgramLog(void *, char *log) {
  std::strcpy(log, variable(log_variable, ""));
  return 0;
}
int nvrtcGetCUBINSize(void *, size_t *size) {
  *size = sizeof kCode;
  return 0;
}
int nvrtcGetCUBIN(void *, char *code) {
  std::memcpy(code, kCode, sizeof kCode);
  return 0;
}
#ifndef FAKE_NVRTC_LACKS_A_FUNCTION
int nvrtcDestroyProgram(void **program) {
  std::free(*program);
  *program = nullptr;
  return 0;
}
#endif
}
