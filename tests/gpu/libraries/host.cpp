// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// host FIRST SECOND: loads both libraries, in both orders and with all their symbols in sight of each other,
// and looks whether each has and calls its own kernels. Where a loader took one library's for both, CUDA
// would be asked, by the address of the one's, for a kernel that the other's module has registered. With a
// device, both compute, and what remains computes when the other is closed.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

int problems = 0;

void expect(bool right, const std::string& what) {
  if (right) return;
  std::printf("not so: %s\n", what.c_str());
  ++problems;
}

class library {
 public:
  library(const char* path, std::string name) : name_(std::move(name)) {
    handle_ = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (handle_ == nullptr) {
      std::printf("%s\n", dlerror());
      std::exit(1);
    }
    void* function = symbol("devices_of_");
    Dl_info info{};
    if (dladdr(function, &info) != 0) base_ = info.dli_fbase;
  }

  const void* launcher() const { return call<const void*>("launcher_of_"); }
  const void* kernel() const { return call<const void*>("kernel_of_"); }
  int devices() const { return call<int>("devices_of_"); }
  const std::string& name() const { return name_; }

  bool holds(const void* address) const {
    Dl_info info{};
    return dladdr(address, &info) != 0 && info.dli_fbase == base_;
  }
  void compute() const { expect(call<int>("compute_in_") == 0, name_ + " computes right"); }
  void close() { expect(dlclose(handle_) == 0, name_ + " is closed"); }

 private:
  void* symbol(const char* prefix) const {
    void* found = dlsym(handle_, (prefix + name_).c_str());
    if (found == nullptr) {
      std::printf("%s\n", dlerror());
      std::exit(1);
    }
    return found;
  }
  template <class R>
  R call(const char* prefix) const {
    return reinterpret_cast<R (*)()>(symbol(prefix))();
  }

  std::string name_;
  void* handle_ = nullptr;
  const void* base_ = nullptr;
};

/// One order of loading; `close_earlier`: which of the two is closed. The exit status of its process.
int load(library a, library b, bool close_earlier) {
  for (const library* each : {&a, &b}) {
    expect(each->holds(each->launcher()), each->name() + " has the launcher that it calls");
    expect(each->holds(each->kernel()), each->name() + " has the kernel that it starts");
  }
  expect(a.launcher() != b.launcher(), "the launchers are two");
  expect(a.kernel() != b.kernel(), "the kernels are two");
  if (a.devices() > 0) {
    a.compute();
    b.compute();
    a.compute();
    library& closed = close_earlier ? a : b;
    library& kept = close_earlier ? b : a;
    closed.close();
    kept.compute();
    std::printf("%s, then %s: both compute, and %s when the other is closed\n", a.name().c_str(),
                b.name().c_str(), kept.name().c_str());
  } else {
    std::printf("%s, then %s: no CUDA device, nothing was computed\n", a.name().c_str(), b.name().c_str());
  }
  return problems == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::puts("host FIRST SECOND");
    return 2;
  }
  int failed = 0;
  for (const bool swapped : {false, true}) {
    for (const bool close_earlier : {true, false}) {
      std::fflush(stdout);
      const pid_t child = fork();  // what is loaded once stays in a process
      if (child < 0) {
        std::perror("fork");
        return 1;
      }
      if (child == 0) {
        const char* names[] = {"first", "second"};
        library a(argv[swapped ? 2 : 1], names[swapped ? 1 : 0]);
        library b(argv[swapped ? 1 : 2], names[swapped ? 0 : 1]);
        std::exit(load(a, b, close_earlier));
      }
      int status = 0;
      if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0) ++failed;
    }
  }
  if (failed > 0) std::printf("%d of 4 orders failed\n", failed);
  return failed > 0 ? 1 : 0;
}
