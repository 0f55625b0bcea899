// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: file descriptors, reads and writes of a given number of bytes, and the temporary files of
/// atomic_writer. POSIX only.

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <pufferfish/core/message.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Throws io_error with the text "PATH: WHAT: the system's message for the error `code`".
[[noreturn]] inline void throw_system_error(const std::string& path, const std::string& what, int code) {
  throw_error<io_error>({path, ": ", what, ": ", std::generic_category().message(code)});
}

/// Owns a file descriptor and closes it in the destructor. Move-only. The value -1 means that there is no
/// descriptor.
class file_descriptor {
 public:
  file_descriptor() = default;
  /// Takes ownership of a descriptor, or of none if fd is -1.
  explicit file_descriptor(int fd) : fd_(fd) {}
  file_descriptor(file_descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  file_descriptor& operator=(file_descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~file_descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  /// The descriptor, or -1.
  int get() const { return fd_; }
  /// Whether there is a descriptor.
  bool is_open() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

/// Returns the result of a system call, which is repeated while a signal interrupts it. If the result is
/// negative, errno has the reason.
template <class Call>
auto uninterrupted(Call&& call) {
  for (;;) {
    const auto result = call();
    if (result >= 0 || errno != EINTR) return result;
  }
}

/// Calls open(2) with O_CLOEXEC and mode 0666. If the result is not open, errno has the reason.
inline file_descriptor open_file(const std::string& path, int flags) {
  return file_descriptor(uninterrupted([&] { return ::open(path.c_str(), flags | O_CLOEXEC, 0666); }));
}

/// Largest number of bytes requested from one call of read(2) or write(2).
inline constexpr std::size_t largest_piece = std::size_t{1} << 30;

/// Writes all bytes. `path`: name of the file in errors. Throws io_error.
inline void write_all(int fd, std::span<const std::uint8_t> bytes, const std::string& path) {
  const std::size_t total = bytes.size();
  while (!bytes.empty()) {
    const ssize_t written =
        uninterrupted([&] { return ::write(fd, bytes.data(), std::min(bytes.size(), largest_piece)); });
    if (written < 0) {
      const int code = errno;
      throw_system_error(
          path, "cannot write " + std::to_string(bytes.size()) + " of " + std::to_string(total) + " bytes",
          code);
    }
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

/// Writes all bytes at an offset of the file. The file position used by write(2) does not change. `path`:
/// name of the file in errors. Throws io_error.
inline void write_all_at(int fd, std::uint64_t offset, std::span<const std::uint8_t> bytes,
                         const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t written = uninterrupted([&] {
      return ::pwrite(fd, bytes.data(), std::min(bytes.size(), largest_piece), static_cast<off_t>(offset));
    });
    if (written < 0) {
      const int code = errno;
      throw_system_error(
          path, "cannot write " + std::to_string(bytes.size()) + " bytes at byte " + std::to_string(offset),
          code);
    }
    offset += static_cast<std::uint64_t>(written);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

/// Fills `out` with the bytes of the file from `offset` on. `path`: name of the file in errors. Throws
/// io_error, also if the file ends before `out` is full.
inline void read_all_at(int fd, std::uint64_t offset, std::span<std::uint8_t> out, const std::string& path) {
  while (!out.empty()) {
    const ssize_t got = uninterrupted([&] {
      return ::pread(fd, out.data(), std::min(out.size(), largest_piece), static_cast<off_t>(offset));
    });
    if (got < 0) {
      const int code = errno;
      throw_system_error(path, "cannot read at byte " + std::to_string(offset), code);
    }
    if (got == 0) {
      throw_error<io_error>({path, ": ends at byte ", offset, ", ", out.size(), " bytes too early"});
    }
    offset += static_cast<std::uint64_t>(got);
    out = out.subspan(static_cast<std::size_t>(got));
  }
}

/// Calls fsync(2). Returns false after an error, with the reason in errno.
inline bool sync(int fd) {
  return uninterrupted([&] { return ::fsync(fd); }) == 0;
}
/// Calls flock(2). Returns false after an error, with the reason in errno. With LOCK_NB, the call returns at
/// once if another process holds the lock.
inline bool lock(int fd, int operation) {
  return uninterrupted([&] { return ::flock(fd, operation); }) == 0;
}

/// Whether the path still names the file that the descriptor `fd` has open.
inline bool names_open_file(const std::string& path, int fd) {
  struct stat by_path {};
  struct stat by_descriptor {};
  return ::lstat(path.c_str(), &by_path) == 0 && ::fstat(fd, &by_descriptor) == 0 &&
         by_path.st_ino == by_descriptor.st_ino && by_path.st_dev == by_descriptor.st_dev;
}

/// Splits a path into its folder with a trailing slash ("./" if the path has no folder) and its last
/// component.
inline std::pair<std::string, std::string> split_path(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return {"./", path};
  return {path.substr(0, slash + 1), path.substr(slash + 1)};
}

/// True for a regular file or a link to one; false also if the path cannot be examined.
inline bool is_regular_file(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode);
}

/// Whether `name` is a name that atomic_writer uses for a temporary file of `target`:
/// "<target>.tmp-<digits>-<digits>".
inline bool is_temporary_name(std::string_view name, std::string_view target) {
  constexpr std::string_view mark = ".tmp-";
  if (name.substr(0, target.size()) != target) return false;
  name.remove_prefix(target.size());
  if (name.substr(0, mark.size()) != mark) return false;
  name.remove_prefix(mark.size());
  const std::size_t dash = name.find('-');
  const auto all_digits = [](std::string_view text) {
    return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
  };
  return dash != std::string_view::npos && all_digits(name.substr(0, dash)) &&
         all_digits(name.substr(dash + 1));
}

/// Removes temporary files of this target whose writers were killed. A running writer holds a lock on its
/// temporary file, so a file that can be locked is stale. Process ids are no evidence, because they repeat in
/// containers and differ between them. Files that cannot be locked or removed are kept: a leftover must not
/// prevent the next write.
inline void remove_stale_temporaries(const std::string& folder, const std::string& target) {
  DIR* const listing = ::opendir(folder.c_str());
  if (listing == nullptr) return;
  std::vector<std::string> found;
  while (const dirent* entry = ::readdir(listing)) {
    if (is_temporary_name(entry->d_name, target)) found.push_back(folder + entry->d_name);
  }
  ::closedir(listing);
  for (const std::string& path : found) {
    const file_descriptor file = open_file(path, O_RDWR | O_NOFOLLOW | O_NONBLOCK);
    if (!file.is_open() || !lock(file.get(), LOCK_EX | LOCK_NB)) continue;
    // Between the listing and the lock, the owner may have
    // renamed this file and created another one of the same name.
    if (names_open_file(path, file.get())) ::unlink(path.c_str());
  }
}

/// Whether a path names a descriptor that the process has already open: standard input, or the path to which
/// a shell expands <(command).
inline bool names_descriptor(std::string_view path) {
  return path == "/dev/stdin" || path.starts_with("/dev/fd/") || path.starts_with("/proc/self/fd/");
}

/// Opens a regular file, or a pipe that the process has already open (see names_descriptor), and sets
/// `status` to the result of fstat(2). Never blocks, whereas a plain open of a named pipe would wait for
/// another process to write to the pipe. Throws io_error for a directory, a device, a named pipe, and a path
/// that cannot be opened.
inline file_descriptor open_for_reading(const std::string& path, struct stat& status) {
  file_descriptor file = open_file(path, O_RDONLY | O_NONBLOCK | O_NOCTTY);
  if (!file.is_open()) throw_system_error(path, "cannot open for reading", errno);
  if (::fstat(file.get(), &status) != 0) throw_system_error(path, "cannot read its size", errno);
  if (S_ISDIR(status.st_mode)) throw_system_error(path, "cannot read", EISDIR);
  // A device may never end: reading up to a limit of gigabytes could exhaust the memory first.
  if (S_ISCHR(status.st_mode) || S_ISBLK(status.st_mode)) {
    throw_error<io_error>({path, ": a device, not a file"});
  }
  if (!S_ISREG(status.st_mode)) {
    if (!names_descriptor(path)) throw_error<io_error>({path, ": a named pipe, not a file"});
    const int flags = ::fcntl(file.get(), F_GETFL);
    if (flags < 0 || ::fcntl(file.get(), F_SETFL, flags & ~O_NONBLOCK) != 0) {
      throw_system_error(path, "cannot wait for its bytes", errno);
    }
  }
  return file;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
