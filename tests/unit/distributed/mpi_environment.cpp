// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// MPI's whole life in one process of one rank (started without a launcher), so the cases depend on their
// order: a process can start MPI only once.
#include <doctest/doctest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include <pufferfish/distributed/mpi_environment.hpp>

namespace pf = pufferfish;

namespace {

template <class Error, class F>
std::string text_of(const F& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

/// Exit status of f() in a child process; 100 if f returned, 101 if it threw, -1 if a signal ended it.
template <class F>
int status_of_child(const F& f) {
  std::fflush(nullptr);  // else the child would print our buffer again
  const pid_t child = fork();
  if (child == 0) {
    int status = 100;
    try {
      f();
    } catch (...) {
      status = 101;
    }
    _exit(status);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

static_assert(!std::is_copy_constructible_v<pf::mpi::environment>);

TEST_CASE("environment: left by an exception it aborts, left quietly it finalizes (each in a child)") {
  CHECK(status_of_child([] { pf::mpi::environment environment; }) == 100);
  // 101 would say that the exception got past the environment: then the other ranks would hang.
  const int thrown = status_of_child([] {
    pf::mpi::environment environment;
    throw std::runtime_error("one rank fails");
  });
  CHECK(thrown != 100);
  CHECK(thrown != 101);
  CHECK(thrown != 0);
  const int aborted = status_of_child([] {
    pf::mpi::environment environment;
    try {
      throw std::runtime_error("printed by the program");
    } catch (const std::exception&) {
      environment.abort(7);
    }
  });
  CHECK((aborted == 7 || aborted == -1));
  // Handled inside the scope: an ordinary end.
  CHECK(status_of_child([] {
          pf::mpi::environment environment;
          try {
            throw std::runtime_error("harmless");
          } catch (const std::exception&) {
          }
        }) == 100);
}

TEST_CASE("MPI's life: before, during, after") {
  CHECK(text_of<pf::state_error>([] { pf::mpi::communicator comm(MPI_COMM_WORLD); }) ==
        "mpi::communicator: MPI is not initialised: call MPI_Init_thread first");

  std::unique_ptr<pf::mpi::communicator> survivor;
  pf::mpi::request pending;
  std::vector<double> values{1, 2, 3};
  {
    pf::mpi::environment environment(pf::mpi::thread_level::serialized);
    int provided = -1;
    MPI_Query_thread(&provided);
    CHECK(static_cast<int>(environment.provided()) == provided);
    CHECK(environment.provided() >= pf::mpi::thread_level::single);
    CHECK(text_of<pf::state_error>([] { pf::mpi::environment second; }) ==
          "mpi::environment: MPI is already initialised, so it has an owner");

    survivor = std::make_unique<pf::mpi::communicator>(MPI_COMM_WORLD);
    CHECK(survivor->size() == 1);
    pending = survivor->start_all_reduce_sum(std::span(values));
    pending.wait();
    CHECK(values == std::vector<double>{1, 2, 3});
  }
  int finalized = 0;
  MPI_Finalized(&finalized);
  CHECK(finalized == 1);
  survivor.reset();  // must not touch MPI any more
  CHECK(text_of<pf::state_error>([] { pf::mpi::communicator comm(MPI_COMM_WORLD); }) ==
        "mpi::communicator: MPI is already finalized");
  CHECK(text_of<pf::state_error>([] { pf::mpi::environment again; }) ==
        "mpi::environment: MPI is already finalized and cannot start again");
}
