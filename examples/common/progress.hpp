// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Shows the progress of a training run: a bar on a terminal, else one line per epoch.

#include <chrono>
#include <cmath>
#include <string>
#include <utility>

#include <pufferfish/train/options.hpp>

#include "console.hpp"
#include "text.hpp"

namespace examples {

/// The words of a progress display: its unit, and its measure of quality.
struct progress_words {
  const char* unit = "images";  ///< unit of the rate
  bool perplexity = false;      ///< shows exp(loss) instead of the accuracy
};

/// Shows the progress of one run. `batch`: samples per step, for the rate.
class progress final : public pufferfish::training_observer {
 public:
  progress(const console& out, std::string title, pufferfish::index_t batch, progress_words words = {})
      : out_(out), title_(std::move(title)), batch_(static_cast<double>(batch)), words_(words) {}
  progress(const progress&) = delete;
  progress& operator=(const progress&) = delete;
  /// Leaves the bar's last state on the screen.
  ~progress() override {
    if (out_.style() == progress_style::bar && drawn_) std::fputs("\n", stderr);
  }

  void on_step(const pufferfish::training_position& at) override {
    ++steps_;
    if (out_.style() != progress_style::bar) return;
    const clock::time_point now = clock::now();
    const bool last = at.epoch + 1 == at.epochs && at.step == at.steps;
    if (!last && drawn_ && now - drawn_at_ < std::chrono::milliseconds(100)) return;
    drawn_at_ = now;
    draw(at, std::chrono::duration<double>(now - start_).count());
  }

  void on_epoch(const pufferfish::epoch_result& epoch) override {
    tested_ = ", test " + quality(epoch.test_loss, epoch.test_accuracy);
    if (out_.style() != progress_style::lines) return;
    out_.line(
        format("%s  epoch %3td  %-8s  rate %.4f  train loss %.4f  test loss %.4f  test %s  %.2f ms/step",
               title_.c_str(), epoch.epoch + 1, epoch.low_rank ? "low rank" : "dense", epoch.learning_rate,
               epoch.train_loss, epoch.test_loss, quality(epoch.test_loss, epoch.test_accuracy).c_str(),
               epoch.step_ms));
  }

  void on_switch(const pufferfish::switch_result& result) override {
    if (out_.style() != progress_style::lines) return;
    const auto& factors = result.factors;
    out_.line(format("%s  switch: %zu layers, %s -> %s parameters, kept energy %.4f, %.1f ms", title_.c_str(),
                     factors.layers.size(), grouped(factors.parameters_before).c_str(),
                     grouped(factors.parameters_after).c_str(), factors.kept_energy(), result.milliseconds));
  }

 private:
  using clock = std::chrono::steady_clock;

  std::string quality(double loss, double accuracy) const {
    return words_.perplexity ? format("perplexity %.2f", std::exp(loss))
                             : format("accuracy %.2f %%", accuracy);
  }

  void draw(const pufferfish::training_position& at, double seconds) {
    constexpr int width = 24;
    const double all = static_cast<double>(at.epochs) * static_cast<double>(at.steps);
    const double done =
        static_cast<double>(at.epoch) * static_cast<double>(at.steps) + static_cast<double>(at.step);
    const auto filled = static_cast<std::size_t>(width * done / all);
    const double rate = seconds > 0.0 ? static_cast<double>(steps_) / seconds : 0.0;
    const std::string bar = std::string(filled, '#') + std::string(width - filled, '.');
    std::fprintf(stderr, "\r%s [%s] epoch %td/%td, %.0f %s/s, %s left, loss %.4f, %s%s\033[K", title_.c_str(),
                 bar.c_str(), at.epoch + 1, at.epochs, rate * batch_, words_.unit,
                 clock_text(rate > 0.0 ? (all - done) / rate : 0.0).c_str(), at.loss,
                 quality(at.loss, at.accuracy).c_str(), tested_.c_str());
    std::fflush(stderr);
    drawn_ = true;
  }

  const console& out_;
  std::string title_;
  double batch_;
  progress_words words_;
  clock::time_point start_ = clock::now();
  clock::time_point drawn_at_;
  bool drawn_ = false;
  long steps_ = 0;
  std::string tested_;
};

}  // namespace examples
