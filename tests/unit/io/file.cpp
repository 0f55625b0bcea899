// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "../support/io_support.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <chrono>
#include <thread>

#include <doctest/doctest.h>

#include <pufferfish/io/file.hpp>
#include <pufferfish/io/safetensors_stream.hpp>

using namespace pufferfish;
using namespace io_test;

namespace {

/// Lets files grow to `bytes` only, with an error instead of a signal.
class file_size_limit {
 public:
  explicit file_size_limit(rlim_t bytes) : old_handler_(::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &old_);
    rlimit limit = old_;
    limit.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~file_size_limit() {
    ::setrlimit(RLIMIT_FSIZE, &old_);
    ::signal(SIGXFSZ, old_handler_);
  }

 private:
  void (*old_handler_)(int);
  rlimit old_{};
};

}  // namespace

TEST_CASE("read_file returns what write_file_atomically wrote") {
  const scratch_folder folder;
  std::mt19937 random(7);
  for (const std::size_t size : {0UL, 1UL, 2UL, 4095UL, 4096UL, 4097UL, 300001UL}) {
    bytes content(size);
    for (auto& b : content) b = static_cast<std::uint8_t>(random());
    write_file_atomically(folder / "a", content);
    CHECK(read_file(folder / "a") == content);
  }
  CHECK(list(folder.path()) == std::vector<std::string>{"a"});
}

TEST_CASE("read_file holds to its limit") {
  const scratch_folder folder;
  write_file_atomically(folder / "a", bytes(10, 1));
  CHECK(read_file(folder / "a", 10).size() == 10);
  const std::string text = io_error_of([&] { read_file(folder / "a", 9); });
  CHECK(mentions(text, folder / "a"));
  CHECK(mentions(text, "10 bytes"));
  CHECK(mentions(text, "9 bytes"));
  // Endless, and without a size that could be known beforehand.
  CHECK(mentions(io_error_of([] { read_file("/dev/zero"); }), "/dev/zero: a device, not a file"));
  // A size that no memory has is refused before memory is taken.
  {
    const auto file = detail::open_file(folder / "sparse", O_WRONLY | O_CREAT);
    REQUIRE(::ftruncate(file.get(), off_t{1} << 40) == 0);
  }
  CHECK(mentions(io_error_of([&] { read_file(folder / "sparse"); }), "1099511627776"));
}

TEST_CASE("read_file reads pipes") {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const bytes content(10000, 42);
  detail::write_all(ends[1], content, "pipe");
  ::close(ends[1]);
  CHECK(read_file("/dev/fd/" + std::to_string(ends[0])) == content);
  ::close(ends[0]);
}

TEST_CASE("a named pipe is refused at once, with and without a writer") {
  const scratch_folder folder;
  const std::string path = folder / "fifo";
  REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
  CHECK(mentions(io_error_of([&] { read_file(path); }), path + ": a named pipe, not a file"));
  CHECK(mentions(io_error_of([&] { safetensors_reader{path}; }), path + ": a named pipe, not a file"));
  CHECK(mentions(io_error_of([&] { write_file_atomically(path, {}); }), "not a regular file"));
  const auto writer = detail::open_file(path, O_RDWR);
  REQUIRE(writer.is_open());
  CHECK(mentions(io_error_of([&] { read_file(path); }), path + ": a named pipe, not a file"));
  CHECK(mentions(io_error_of([] { safetensors_reader{"/dev/zero"}; }), "/dev/zero: a device, not a file"));
}

TEST_CASE("read_file names path and reason") {
  const scratch_folder folder;
  const std::string missing = io_error_of([&] { read_file(folder / "missing"); });
  CHECK(mentions(missing, folder / "missing"));
  CHECK(mentions(missing, "No such file"));
  CHECK(mentions(io_error_of([&] { read_file(folder.path()); }), "Is a directory"));
  write_file_atomically(folder / "secret", bytes(3, 1));
  REQUIRE(::chmod((folder / "secret").c_str(), 0) == 0);
  // Root may read everything: read the file as another user.
  const bool root = ::geteuid() == 0;
  if (root && (::chmod(folder.path().c_str(), 0755) != 0 || ::seteuid(65534) != 0)) {
    MESSAGE("skipped: cannot stop being root");
    return;
  }
  const std::string secret = io_error_of([&] { read_file(folder / "secret"); });
  const std::string write = io_error_of([&] { write_file_atomically("/not-mine", {}); });
  if (root) REQUIRE(::seteuid(0) == 0);
  CHECK(mentions(secret, "Permission denied"));
  CHECK(mentions(write, "cannot create"));
}

TEST_CASE("atomic_writer: nothing happens without commit") {
  const scratch_folder folder;
  write_file_atomically(folder / "a", to_bytes("old"));
  {
    atomic_writer writer(folder / "a");
    writer.write(to_bytes("new"));
    CHECK(list(folder.path()).size() == 2);
    CHECK(to_text(read_file(folder / "a")) == "old");
  }
  CHECK(list(folder.path()) == std::vector<std::string>{"a"});
  CHECK(to_text(read_file(folder / "a")) == "old");
}

TEST_CASE("atomic_writer appends, commits once, and is then spent") {
  const scratch_folder folder;
  atomic_writer writer(folder / "a");
  writer.write(to_bytes("one "));
  writer.write({});
  writer.write(to_bytes("two"));
  writer.commit();
  CHECK(to_text(read_file(folder / "a")) == "one two");
  CHECK_THROWS_AS(writer.write(to_bytes("x")), state_error);
  CHECK_THROWS_AS(writer.commit(), state_error);
}

TEST_CASE("atomic_writer: two writers of one path do not disturb each other") {
  const scratch_folder folder;
  atomic_writer first(folder / "a");
  first.write(to_bytes("first"));
  atomic_writer second(folder / "a");  // must not take the first one's temporary for a stale one
  second.write(to_bytes("second"));
  CHECK(list(folder.path()).size() == 2);
  second.commit();
  CHECK(to_text(read_file(folder / "a")) == "second");
  first.commit();
  CHECK(to_text(read_file(folder / "a")) == "first");
  CHECK(list(folder.path()).size() == 1);
}

TEST_CASE("atomic_writer under many threads: always one whole content") {
  const scratch_folder folder;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const bytes content(5000, static_cast<std::uint8_t>('a' + t));
      for (int i = 0; i < 20; ++i) write_file_atomically(folder / "a", content);
    });
  }
  for (auto& thread : threads) thread.join();
  const bytes content = read_file(folder / "a");
  CHECK(content == bytes(5000, content.at(0)));
  CHECK(list(folder.path()) == std::vector<std::string>{"a"});
}

TEST_CASE("atomic_writer removes stale temporaries of its own target only") {
  const scratch_folder folder;
  for (const char* name : {"a.tmp-1-0", "a.tmp-99999999-12", "a.tmp-12", "a.tmp-x-1", "a.tmp-1-", "b.tmp-1-0",
                           "aa.tmp-1-0", "a.tmp-1-0.txt"}) {
    write_file_atomically(folder / name, to_bytes("x"));
  }
  // The names above were written as targets; only the first two look like temporaries of "a".
  write_file_atomically(folder / "a", to_bytes("x"));
  const std::vector<std::string> left = list(folder.path());
  CHECK(left.size() == 7);
  for (const std::string& name : left) {
    CHECK(name != "a.tmp-1-0");
    CHECK(name != "a.tmp-99999999-12");
  }
}

TEST_CASE("atomic_writer keeps the mode of the file it replaces") {
  const scratch_folder folder;
  write_file_atomically(folder / "a", to_bytes("x"));
  REQUIRE(::chmod((folder / "a").c_str(), 0600) == 0);
  write_file_atomically(folder / "a", to_bytes("y"));
  struct stat status {};
  REQUIRE(::stat((folder / "a").c_str(), &status) == 0);
  CHECK((status.st_mode & 0777) == 0600);
}

TEST_CASE("atomic_writer refuses what it cannot replace") {
  const scratch_folder folder;
  REQUIRE(::mkdir((folder / "sub").c_str(), 0700) == 0);
  CHECK(mentions(io_error_of([&] { write_file_atomically(folder / "sub", {}); }), "Is a directory"));
  CHECK(mentions(io_error_of([&] { write_file_atomically(folder / "sub/", {}); }), "Is a directory"));
  CHECK(mentions(io_error_of([&] { write_file_atomically("", {}); }), "Is a directory"));
  CHECK(mentions(io_error_of([&] { write_file_atomically(folder / "none/a", {}); }), "No such file"));
  CHECK(mentions(io_error_of([&] { write_file_atomically("/dev/null", {}); }), "not a regular file"));
  CHECK(
      mentions(io_error_of([&] { write_file_atomically(folder / std::string(255, 'n'), {}); }), "too long"));
  CHECK(list(folder.path()) == std::vector<std::string>{"sub"});
  CHECK(list(folder / "sub").empty());
}

TEST_CASE("a relative path without a folder") {
  const scratch_folder folder;
  char before[4096];
  REQUIRE(::getcwd(before, sizeof before) != nullptr);
  REQUIRE(::chdir(folder.path().c_str()) == 0);
  write_file_atomically("plain", to_bytes("x"));
  write_file_atomically("plain", to_bytes("y"));
  const auto names = list(".");
  REQUIRE(::chdir(before) == 0);
  CHECK(names == std::vector<std::string>{"plain"});
}

TEST_CASE("full disk: the low-level writer reports it") {
  const auto file = detail::open_file("/dev/full", O_WRONLY);
  if (!file.is_open()) {
    MESSAGE("skipped: no /dev/full");
    return;
  }
  const std::string text = io_error_of([&] { detail::write_all(file.get(), bytes(5000, 1), "some/path"); });
  CHECK(mentions(text, "some/path"));
  CHECK(mentions(text, "5000 bytes"));
  CHECK(mentions(text, "No space left"));
}

TEST_CASE("file size limit while saving: the old file stays, the temporary goes") {
  const scratch_folder folder;
  const bytes old(3000, 'o');
  write_file_atomically(folder / "a", old);
  std::string text;
  bool spent = false;
  {
    const file_size_limit limit(10000);
    atomic_writer writer(folder / "a");
    writer.write(bytes(9000, 'n'));
    text = io_error_of([&] { writer.write(bytes(2000, 'n')); });
    try {
      writer.commit();
    } catch (const state_error&) {
      spent = true;
    }
  }
  CHECK(mentions(text, folder / "a"));
  CHECK(mentions(text, "too large"));
  CHECK(spent);
  CHECK(read_file(folder / "a") == old);
  CHECK(list(folder.path()) == std::vector<std::string>{"a"});
}

TEST_CASE("full disk while saving, on a file system of 64 KiB") {
  const scratch_folder folder;
  const std::string disk = folder / "disk";
  REQUIRE(::mkdir(disk.c_str(), 0700) == 0);
  if (::mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=64k") != 0) {
    MESSAGE("skipped: this user may not mount");
    return;
  }
  const bytes old(20000, 'o');
  write_file_atomically(disk + "/a", old);
  const std::string text = io_error_of([&] { write_file_atomically(disk + "/a", bytes(100000, 'n')); });
  const bool kept = read_file(disk + "/a") == old;
  const std::vector<std::string> left = list(disk);
  CHECK(::umount(disk.c_str()) == 0);
  CHECK(mentions(text, "No space left"));
  CHECK(kept);
  CHECK(left == std::vector<std::string>{"a"});
}

TEST_CASE("SIGKILL at any moment leaves the old content or the new, and at most a stale temporary") {
  const scratch_folder folder;
  const std::string path = folder / "a";
  write_file_atomically(path, bytes(40000, 'a'));
  std::mt19937 random(11);
  std::size_t most_left = 0;
  for (int round = 0; round < 40; ++round) {
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      ::alarm(10);  // should the parent die first
      for (unsigned i = 0;; ++i) {
        atomic_writer writer(path);
        const bytes quarter(10000, static_cast<std::uint8_t>('a' + i % 26));
        for (int part = 0; part < 4; ++part) writer.write(quarter);
        writer.commit();
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 15000));
    REQUIRE(::kill(child, SIGKILL) == 0);
    REQUIRE(::waitpid(child, nullptr, 0) == child);
    const bytes content = read_file(path);
    REQUIRE(content.size() == 40000);
    REQUIRE(content == bytes(40000, content[0]));
    most_left = std::max(most_left, list(folder.path()).size());
  }
  CHECK(most_left <= 2);
  write_file_atomically(path, to_bytes("end"));
  CHECK(list(folder.path()) == std::vector<std::string>{"a"});
}
