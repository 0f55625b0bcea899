// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The main program of an example: options, MPI if a launcher started the process, errors as one line. Exit
/// status: 1 for an error, 2 for unknown options or arguments.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include <CLI/CLI.hpp>

#include <pufferfish/core/error.hpp>
#include <pufferfish/distributed/self.hpp>
#if defined(PUFFERFISH_EXAMPLES_MPI)
#include <pufferfish/distributed/mpi_environment.hpp>
#endif

namespace examples {

/// Number of processes according to the launcher that started this one; 0 without a launcher.
inline int launched_processes() {
  // Open MPI; MPICH and its relatives; anything that speaks PMIx (its launchers set no count).
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    if (const char* text = std::getenv(name)) return std::atoi(text);
  }
  return std::getenv("PMIX_RANK") != nullptr ? 1 : 0;
}

/// The lowest rank that is not missing; it acts for all others.
inline int lowest_present(const std::vector<int>& missing) {
  int rank = 0;
  while (std::find(missing.begin(), missing.end(), rank) != missing.end()) ++rank;
  return rank;
}

namespace session {

inline void complain(const std::string& program, const char* text) {
  std::string line = text;
  for (char& c : line) c = c == '\n' ? ' ' : c;
  std::fprintf(stderr, "%s: %s\n", program.c_str(), line.c_str());
}

/// Parses the options; rank 0 prints help or the error. True if the program should go on; else `status` is
/// its exit status: 0 after --help, 2 for wrong options.
inline bool parse(CLI::App& app, int argc, char** argv, int rank, int& status) {
  status = 0;
  try {
    app.parse(argc, argv);
    return true;
  } catch (const CLI::CallForHelp&) {
    if (rank == 0) std::fputs(app.help().c_str(), stdout);
  } catch (const CLI::ParseError& e) {
    if (rank == 0) complain(app.get_name(), (std::string(e.what()) + " (--help lists the options)").c_str());
    status = 2;
  }
  return false;
}

/// The result of program(comm); 0 if it returns void.
template <class Program, class Comm>
int status_of(Program& program, Comm& comm) {
  if constexpr (std::is_void_v<decltype(program(comm))>) {
    program(comm);
    return 0;
  } else {
    return program(comm);
  }
}

#if defined(PUFFERFISH_EXAMPLES_MPI)
template <class Program>
int run_with_mpi(CLI::App& app, int argc, char** argv, int expected, const std::optional<double>& timeout,
                 Program& program,
                 pufferfish::mpi::thread_level level = pufferfish::mpi::thread_level::serialized) {
  const pufferfish::mpi::environment environment(level);  // the gradient exchange has its own thread
  int rank = 0;
  try {
    pufferfish::mpi::communicator comm(MPI_COMM_WORLD);
    rank = comm.rank();
    if (expected > 1 && comm.size() == 1) {
      throw pufferfish::backend_error("the launcher started " + std::to_string(expected) +
                                      " processes, MPI sees 1: mpirun belongs to another MPI than the one "
                                      "this program was built with");
    }
    int status = 0;
    if (parse(app, argc, argv, rank, status)) {
      if (timeout) comm.set_timeout(*timeout);
      status = status_of(program, comm);
    }
    return status;
  } catch (const pufferfish::timeout_error& e) {
    // The rank that saves the run ends the job; until then the others must not end it.
    if (rank != lowest_present(e.missing())) std::this_thread::sleep_for(std::chrono::seconds(30));
    complain(app.get_name(), e.what());
    environment.abort(1);
  } catch (const std::exception& e) {
    // Rank 0 reports an error that all ranks see and ends the others while they wait.
    if (rank != 0) std::this_thread::sleep_for(std::chrono::seconds(3));
    complain(app.get_name(), e.what());
    environment.abort(1);
  }
}
#endif

/// Parses the options and calls `program(communicator)`, which may return an exit status, on all processes
/// started by an MPI launcher, or alone without one. Returns the exit status.
template <class Program>
int start(CLI::App& app, int argc, char** argv, [[maybe_unused]] const std::optional<double>& timeout,
          Program&& program) {
  try {
    const int launched = launched_processes();
#if defined(PUFFERFISH_EXAMPLES_MPI)
    if (launched > 0) return run_with_mpi(app, argc, argv, launched, timeout, program);
#else
    if (launched > 1) {
      throw pufferfish::backend_error("started as " + std::to_string(launched) +
                                      " processes, but built without MPI");
    }
#endif
    pufferfish::self alone;
    int status = 0;
    if (parse(app, argc, argv, 0, status)) status = status_of(program, alone);
    return status;
  } catch (const std::exception& e) {
    complain(app.get_name(), e.what());
    return 1;
  }
}

}  // namespace session

/// Runs `program(communicator)` on all ranks. Adds an option for how long ranks wait for each other.
template <class Program>
int run(CLI::App& app, int argc, char** argv, Program&& program) {
  std::optional<double> timeout;
  app.add_option(
         "--timeout", timeout,
         "Seconds that ranks wait for each other before all give up and one saves the run, several times the "
         "longest step; 0: for ever; by default 600, and no rank saves")
      ->check(CLI::NonNegativeNumber);
  return session::start(app, argc, argv, timeout, program);
}

/// Runs `program()` on rank 0 alone: for programs whose work is not shared among ranks.
template <class Program>
int run_on_first(CLI::App& app, int argc, char** argv, Program&& program) {
  return session::start(app, argc, argv, {}, [&program](auto& comm) {
    if (comm.rank() == 0) program();
  });
}

/// Threads of each process: `asked`, or the machine's cores divided by the number of processes.
inline int threads_for(int asked, int ranks) {
  if (asked > 0) return asked;
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return cores > ranks ? cores / ranks : 1;
}

}  // namespace examples
