// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/kernel_cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda/host/sha256.h"

namespace fa::cuda {
namespace {

constexpr std::string_view kMagic = "flashattn kernel 1\n";
constexpr size_t kMostBytes = size_t{4} << 20, kKeyBytes = 64, kDigestBytes = 32;
constexpr size_t kMostFiles = 1024, kMostTotal = size_t{256} << 20;

struct Numbers {
  int32_t registers, spill_bytes, serialised, alone;
  uint64_t cubin_bytes;
};

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  File(const File &) = delete;
  File &operator=(const File &) = delete;

  int get() const { return descriptor_; }
  explicit operator bool() const { return descriptor_ >= 0; }

 private:
  const int descriptor_;
};

std::string usual_directory() {
  const auto variable = [](const char *name) {
    const char *value = ::secure_getenv(name);
    return std::string(value != nullptr ? value : "");
  };
  const std::string named = variable("FLASHATTN_KERNEL_CACHE"), cache = variable("XDG_CACHE_HOME"), home = variable("HOME");
  if (!named.empty()) return named == "off" ? "" : named;
  if (!cache.empty() && cache[0] == '/') return cache + "/libflashattn";
  return !home.empty() && home[0] == '/' ? home + "/.cache/libflashattn" : "";
}

// Nobody else may read or write it.
bool is_private(int descriptor, mode_t type) {
  struct stat found;
  return fstat(descriptor, &found) == 0 && (found.st_mode & S_IFMT) == type && found.st_uid == geteuid() &&
         (found.st_mode & 077) == 0;
}

bool read_all(int descriptor, std::string &bytes) {
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t n = read(descriptor, bytes.data() + at, bytes.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += static_cast<size_t>(n);
  }
  return true;
}
bool write_all(int descriptor, const std::string &bytes) {
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t n = write(descriptor, bytes.data() + at, bytes.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += static_cast<size_t>(n);
  }
  return true;
}

std::string digest_of(std::string_view bytes) {
  Sha256 hash;
  hash.add(bytes);
  const auto digest = hash.digest();
  return std::string(reinterpret_cast<const char *>(digest.data()), digest.size());
}

// Removes the files that have not been written for longest, as long as there are too many.
void evict(int directory) {
  struct Entry {
    std::string name;
    timespec time;
    size_t bytes;
  };
  std::vector<Entry> entries;
  size_t total = 0;
  const int copy = dup(directory);
  DIR *list = copy >= 0 ? fdopendir(copy) : nullptr;
  if (list == nullptr) {
    if (copy >= 0) ::close(copy);
    return;
  }
  while (const dirent *entry = readdir(list)) {
    struct stat found;
    if (fstatat(directory, entry->d_name, &found, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(found.st_mode)) continue;
    entries.push_back({entry->d_name, found.st_mtim, static_cast<size_t>(found.st_size)});
    total += entries.back().bytes;
  }
  closedir(list);
  std::sort(entries.begin(), entries.end(), [](const Entry &a, const Entry &b) {
    return a.time.tv_sec != b.time.tv_sec ? a.time.tv_sec < b.time.tv_sec : a.time.tv_nsec < b.time.tv_nsec;
  });
  size_t count = entries.size();
  for (const Entry &entry : entries) {
    if (count <= kMostFiles && total <= kMostTotal) return;
    unlinkat(directory, entry.name.c_str(), 0);
    --count;
    total -= entry.bytes;
  }
}

}  // namespace

KernelCache::KernelCache(const char *directory) {
  if (geteuid() == getuid() && getegid() == getgid()) directory_ = directory != nullptr ? directory : usual_directory();
}

int KernelCache::open_directory(bool make) const {
  if (directory_.empty()) return -1;
  if (make) {
    for (size_t at = directory_.find('/', 1); at != std::string::npos; at = directory_.find('/', at + 1))
      mkdir(directory_.substr(0, at).c_str(), 0700);
    mkdir(directory_.c_str(), 0700);
  }
  const int directory = open(directory_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (directory >= 0 && is_private(directory, S_IFDIR)) return directory;
  if (directory >= 0) ::close(directory);
  return -1;
}

bool KernelCache::find(const std::string &key, CompiledCode &code) const {
  const File directory(open_directory(/*make=*/false));
  if (!directory) return false;
  const File file(openat(directory.get(), key.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  struct stat found;
  if (!file || !is_private(file.get(), S_IFREG) || fstat(file.get(), &found) != 0) return false;
  constexpr size_t kHeader = kMagic.size() + kKeyBytes + sizeof(Numbers);
  const auto size = static_cast<size_t>(found.st_size);
  if (size < kHeader + kDigestBytes || size > kMostBytes) return false;
  std::string bytes(size, '\0');
  if (!read_all(file.get(), bytes)) return false;
  const std::string_view all = bytes, content = all.substr(0, size - kDigestBytes);
  if (digest_of(content) != all.substr(size - kDigestBytes)) return false;
  if (content.substr(0, kMagic.size()) != kMagic || content.substr(kMagic.size(), kKeyBytes) != key) return false;
  Numbers numbers;
  std::memcpy(&numbers, bytes.data() + kMagic.size() + kKeyBytes, sizeof numbers);
  if (numbers.cubin_bytes != content.size() - kHeader) return false;
  code = {std::string(content.substr(kHeader)), numbers.registers, numbers.spill_bytes, numbers.serialised != 0,
          numbers.alone != 0};
  return true;
}

void KernelCache::store(const std::string &key, const CompiledCode &code) const {
  const File directory(open_directory(/*make=*/true));
  if (!directory) return;
  const Numbers numbers{code.registers, code.spill_bytes, code.serialised, code.alone, code.cubin.size()};
  std::string bytes = std::string(kMagic) + key;
  bytes.append(reinterpret_cast<const char *>(&numbers), sizeof numbers);
  bytes += code.cubin;
  bytes += digest_of(bytes);
  if (bytes.size() > kMostBytes) return;
  uint64_t random = 0;
  if (getrandom(&random, sizeof random, 0) != static_cast<ssize_t>(sizeof random)) return;
  const std::string name = "new." + std::to_string(getpid()) + "." + std::to_string(random);
  const File file(openat(directory.get(), name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file) return;
  const bool written = write_all(file.get(), bytes) && fsync(file.get()) == 0;
  if (!written || renameat(directory.get(), name.c_str(), directory.get(), key.c_str()) != 0) {
    unlinkat(directory.get(), name.c_str(), 0);
    return;
  }
  static std::atomic<bool> evicted{false};
  if (!evicted.exchange(true)) evict(directory.get());
}

std::string kernel_cache_key(std::initializer_list<std::string_view> parts) {
  Sha256 hash;
  for (const std::string_view part : parts) {
    hash.add(std::to_string(part.size()) + ":");
    hash.add(part);
  }
  return hex(hash.digest());
}

}  // namespace fa::cuda
