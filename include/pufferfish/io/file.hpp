// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Whole files: `read_file` with a size limit, and `atomic_writer`, which replaces a file in one step or not
/// at all. POSIX only.

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/io/descriptor.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Default size limit of the readers of this folder: 4 GiB for a file, and 4 GiB for its decompressed
/// content.
inline constexpr std::uint64_t default_read_limit = std::uint64_t{1} << 32;

/// The bytes of a file, read to its end, or of a pipe that the process has already open (/dev/stdin,
/// /dev/fd/N). `limit`: largest size accepted, in bytes. A larger regular file is rejected before memory is
/// allocated. A pipe is read until its writers close it, with up to about twice its size as buffer. Throws
/// io_error, with the path and the system's reason, for a path that is missing, unreadable, a directory, a
/// device or a named pipe, and for a file above the limit.
/// \code
///   const std::vector<std::uint8_t> bytes = read_file("weights.safetensors", 1 << 30);  // at most 1 GiB
/// \endcode
inline std::vector<std::uint8_t> read_file(const std::string& path,
                                           std::uint64_t limit = default_read_limit) {
  struct stat status {};
  const detail::file_descriptor file = detail::open_for_reading(path, status);
  const auto size = S_ISREG(status.st_mode) ? static_cast<std::uint64_t>(status.st_size) : std::uint64_t{0};
  const std::string above = " is above the limit of " + std::to_string(limit) + " bytes";
  if (size > limit) {
    detail::throw_error<io_error>({path, ": its size of ", size, " bytes", above});
  }
  // One byte more than the size, so that the end is detected without growing the buffer.
  std::vector<std::uint8_t> bytes(std::max<std::size_t>(static_cast<std::size_t>(size) + 1, 4096));
  std::size_t used = 0;
  for (;;) {
    if (used == bytes.size()) bytes.resize(2 * bytes.size());
    const ssize_t got = detail::uninterrupted([&] {
      return ::read(file.get(), bytes.data() + used, std::min(bytes.size() - used, detail::largest_piece));
    });
    if (got < 0) {
      const int code = errno;
      detail::throw_system_error(path, "cannot read after " + std::to_string(used) + " bytes", code);
    }
    if (got == 0) break;
    used += static_cast<std::size_t>(got);
    if (used > limit) detail::throw_error<io_error>({path, ": its length", above});
  }
  bytes.resize(used);
  return bytes;
}

/// Replaces a file in one step: a reader, or a program that starts after a crash, sees the whole old content
/// or the whole new one. The bytes go to "<path>.tmp-<pid>-<n>" in the same folder; `commit()` syncs it,
/// renames it over `path` and syncs the folder. Without commit, or after an error before the rename, the
/// temporary is removed and the old file stays as it was. If only the folder cannot be synced, commit()
/// throws with the new file in place: a crash of the system may then still undo the rename. A killed process
/// leaves its temporary file; the next writer of the same path removes it. Several writers of one path may
/// run at once: the last commit wins. The mode bits of an existing file are kept; a symbolic link is
/// replaced, not followed. One thread at a time uses a writer.
/// \code
///   atomic_writer writer("run.json");
///   writer.write(head);  // std::span<const std::uint8_t>
///   writer.write(body);
///   writer.commit();     // only now run.json is replaced
/// \endcode
class atomic_writer {
 public:
  /// Creates the temporary file. Throws io_error if the creation fails, or if `path` exists and is not a
  /// regular file.
  explicit atomic_writer(std::string path) : path_(std::move(path)) {
    struct stat old {};
    const bool replaces = ::stat(path_.c_str(), &old) == 0;
    const auto [folder, name] = detail::split_path(path_);
    if (name.empty() || (replaces && S_ISDIR(old.st_mode))) {
      detail::throw_system_error(path_, "cannot write", EISDIR);
    }
    if (replaces && !S_ISREG(old.st_mode)) {
      detail::throw_error<io_error>({path_, ": cannot replace what is not a regular file"});
    }
    folder_ = folder;
    detail::remove_stale_temporaries(folder, name);
    open_temporary();
    // Not every file system has mode bits, so a failure is ignored.
    if (replaces && ::fchmod(file_.get(), old.st_mode & 0777U) != 0) errno = 0;
  }

  atomic_writer(const atomic_writer&) = delete;
  atomic_writer& operator=(const atomic_writer&) = delete;

  ~atomic_writer() { discard(); }

  /// Appends bytes to the temporary file. Throws io_error, after which the temporary file is removed;
  /// state_error after commit or an earlier error.
  void write(std::span<const std::uint8_t> bytes) {
    check_open();
    failure_guard guard{this};
    detail::write_all(file_.get(), bytes, path_);
    guard.writer = nullptr;
  }

  /// Overwrites earlier bytes of the temporary file, from `offset` on. The next write() still appends after
  /// the last byte of the file. Throws io_error, after which the temporary file is removed; state_error after
  /// commit or an earlier error.
  void overwrite(std::uint64_t offset, std::span<const std::uint8_t> bytes) {
    check_open();
    failure_guard guard{this};
    detail::write_all_at(file_.get(), offset, bytes, path_);
    guard.writer = nullptr;
  }

  /// Replaces the file by the new content. Throws io_error; state_error after commit or an error. After an
  /// io_error the old file is in place, with one exception: if only the folder cannot be synced, the new file
  /// is in place already, and the text of the error says so.
  void commit() {
    check_open();
    failure_guard guard{this};
    if (!detail::sync(file_.get())) detail::throw_system_error(path_, "cannot sync", errno);
    // Renamed while still locked: another writer would remove an unlocked temporary as a stale one.
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
      const int code = errno;
      detail::throw_system_error(path_, "cannot rename " + temporary_ + " to it", code);
    }
    temporary_.clear();
    file_ = detail::file_descriptor();
    sync_folder();
    guard.writer = nullptr;
  }

 private:
  /// Discards the temporary file during stack unwinding, without a catch block. A null `writer`: the
  /// operation has succeeded.
  struct failure_guard {
    atomic_writer* writer;
    ~failure_guard() {
      if (writer != nullptr) writer->discard();
    }
  };

  // Creates and locks the first of "<path>.tmp-<pid>-0", "-1", ... that does not exist.
  void open_temporary() {
    const std::string stem = path_ + ".tmp-" + std::to_string(::getpid()) + "-";
    for (int n = 0;; ++n) {
      std::string name = stem + std::to_string(n);
      detail::file_descriptor file = detail::open_file(name, O_WRONLY | O_CREAT | O_EXCL);
      if (!file.is_open()) {
        const int code = errno;
        if (code == EEXIST && n < std::numeric_limits<int>::max()) continue;
        detail::throw_system_error(path_, "cannot create " + name, code);
      }
      // Without locks in the file system, no writer removes temporaries, so a failure to lock is ignored.
      // Before the lock, another writer may have removed the file as a stale one; its name is then gone.
      const bool locked = detail::lock(file.get(), LOCK_EX);
      if (locked && !detail::names_open_file(name, file.get())) continue;
      file_ = std::move(file);
      temporary_ = std::move(name);
      return;
    }
  }

  // Throws state_error after commit or an error.
  void check_open() const {
    if (!file_.is_open())
      detail::throw_error<state_error>({path_, ": atomic_writer used after commit or an error"});
  }

  /// Makes the rename durable, which needs a sync of the folder. Some file systems cannot sync a folder
  /// (EINVAL); their error is ignored.
  void sync_folder() const {
    const detail::file_descriptor folder = detail::open_file(folder_, O_RDONLY | O_DIRECTORY);
    if (!folder.is_open()) return;  // the folder may be writable, but not readable
    if (!detail::sync(folder.get()) && errno != EINVAL) {
      detail::throw_system_error(path_, "is in place, but its folder cannot be synced", errno);
    }
  }

  // Removes the temporary file, if there is one.
  void discard() noexcept {
    if (!temporary_.empty()) ::unlink(temporary_.c_str());
    temporary_.clear();
    file_ = detail::file_descriptor();
  }

  std::string path_;
  std::string folder_;
  std::string temporary_;
  detail::file_descriptor file_;
};

/// Replaces the content of `path` by `bytes` in one step (see atomic_writer). Throws io_error; the old file
/// is then unchanged, except if only the folder could not be synced: the new file is then in place.
inline void write_file_atomically(const std::string& path, std::span<const std::uint8_t> bytes) {
  atomic_writer writer(path);
  writer.write(bytes);
  writer.commit();
}

PUFFERFISH_NAMESPACE_END
