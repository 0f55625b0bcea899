// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Hyperparameters of the code of Pufferfish (Wang, Agarwal, Papailiopoulos, MLSys 2021), as plain numbers
/// to copy and change. Epochs count from 0. The network is factorized (the switch) at the start of epoch E.
///
///     image_recipe mine = cifar_recipe();
///     mine.epochs = 100;
///     mine.milestones = {50, 83};

#include <array>
#include <vector>

#include <pufferfish/core/view.hpp>
#include <pufferfish/ops/loss/softmax_cross_entropy.hpp>
#include <pufferfish/optim/adam.hpp>
#include <pufferfish/optim/schedule.hpp>
#include <pufferfish/optim/sgd.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Hyperparameters of an image classifier: SGD, a learning rate that falls at milestones and is not restarted
/// by the switch.
struct image_recipe {
  index_t epochs = 300;
  index_t warmup_epochs = 80;                ///< E, the epoch at whose start the network is factorized
  index_t batch = 128;                       ///< images per step; the smaller last batch of an epoch is kept
  double learning_rate = 0.1;                ///< base rate, multiplied by rate_schedule()
  std::vector<double> milestones{150, 250};  ///< epochs from which the rate is multiplied by gamma
  double gamma = 0.1;                        ///< factor of the rate at each milestone
  sgd_options optimizer{0.9, 0.0, false, 1e-4, true};
  label_smoothing smoothing;  ///< label smoothing of the loss; by default none
  index_t pad = 4;            ///< padding in pixels, from which random crops are taken; 0: no crops
  bool reflect = true;        ///< pads with the mirror image; false: with zeros
  bool resized_crop = false;  ///< whether crops have random size and shape, instead of padding by `pad`
  bool flip = true;           ///< mirrors an image left to right with probability 1/2
  /// Mean of each channel: a pixel p in 0 .. 1 becomes (p - mean) / deviation.
  std::array<double, 3> mean{125.3 / 255, 123.0 / 255, 113.9 / 255};
  /// Standard deviation of each channel.
  std::array<double, 3> deviation{63.0 / 255, 62.1 / 255, 66.7 / 255};

  /// Factor of learning_rate as a function of the epoch. Throws the errors of multi_step.
  schedule rate_schedule() const { return multi_step(milestones, gamma); }
};

/// Hyperparameters for VGG-19 and ResNet-18 on CIFAR-10: 300 epochs, factorized at the start of epoch 80,
/// batches of 128 images. Weight decay applies to all parameters.
inline image_recipe cifar_recipe() { return {}; }

/// Hyperparameters for ResNet-50 and WideResNet-50-2 on ImageNet: crops of 224x224 pixels, no weight decay of
/// biases and batch norms. E = 15 in single precision; the paper's code has E = 10 in mixed precision.
inline image_recipe imagenet_recipe() {
  image_recipe recipe;
  recipe.epochs = 90;
  recipe.warmup_epochs = 15;
  recipe.batch = 256;
  recipe.milestones = {30, 60, 80};
  recipe.optimizer.decay_all = false;
  recipe.smoothing = {0.1, smoothing_kind::wrong_classes};
  recipe.pad = 0;
  recipe.reflect = false;
  recipe.resized_crop = true;
  recipe.mean = {0.485, 0.456, 0.406};
  recipe.deviation = {0.229, 0.224, 0.225};
  return recipe;
}

/// Hyperparameters for the VGG-19 that the paper compares with lottery tickets (vgg19_lth), on CIFAR-10.
inline image_recipe lottery_ticket_recipe() {
  image_recipe recipe;
  recipe.epochs = 160;
  recipe.warmup_epochs = 50;
  recipe.milestones = {80, 120};
  return recipe;
}

/// Hyperparameters for ResNet-18 on CIFAR-10 with 8 workers of 256 images each. The learning rate rises
/// linearly from 0.1 to 1.6 over five epochs, weight decay spares biases and batch norms, and images are
/// padded with zeros. After the switch a new optimizer starts at the full rate.
struct distributed_image_recipe : image_recipe {
  index_t ramp_epochs = 5;        ///< epochs of the linear rise
  double ramp_start = 0.1 / 1.6;  ///< rate at the start of the rise, as a fraction of learning_rate

  /// Factor of learning_rate: the ramp times the milestones. Throws the errors of linear_warmup and
  /// multi_step.
  schedule rate_schedule() const {
    return linear_warmup(static_cast<double>(ramp_epochs), ramp_start, multi_step(milestones, gamma));
  }
};
/// Hyperparameters for ResNet-18 on CIFAR-10 with a global batch of 2048 images.
inline distributed_image_recipe distributed_cifar_recipe() {
  distributed_image_recipe recipe;
  recipe.batch = 2048;
  recipe.learning_rate = 1.6;
  recipe.optimizer.decay_all = false;
  recipe.reflect = false;
  recipe.mean = {0.4914, 0.4822, 0.4465};
  recipe.deviation = {0.2023, 0.1994, 0.2010};
  return recipe;
}

/// Hyperparameters of the two-layer LSTM on WikiText-2: plain SGD on the mean negative log likelihood of a
/// token; the rate is divided by `anneal` after every epoch whose validation loss is no better than the best
/// so far, and multiplied by `switch_rate` at the switch.
struct language_recipe {
  index_t epochs = 40;
  index_t warmup_epochs = 10;  ///< E, the epoch at whose start the network is factorized
  index_t streams = 20;        ///< texts read in parallel, one per row of a batch
  index_t evaluation_streams = 10;
  index_t steps = 35;           ///< tokens of each text per step, the length of backpropagation through time
  double learning_rate = 20.0;  ///< base rate
  double anneal = 4.0;          ///< divisor of the rate; see plateau
  double switch_rate = 0.5;     ///< factor of the rate at the switch
  double clip_norm = 0.25;      ///< largest norm of the gradient; see clip_gradient_norm
  double dropout = 0.65;        ///< see lstm_lm_options
  sgd_options optimizer{};
};
/// Hyperparameters for WikiText-2 of the published code of Wang et al. (Pufferfish, MLSys 2021).
inline language_recipe wikitext2_recipe() { return {}; }

/// Hyperparameters of the Transformer on Multi30k, German to English, trained on the sum of label-smoothed
/// losses over all tokens that are not padding. The schedule of the learning rate restarts at the switch.
struct translation_recipe {
  index_t epochs = 400;
  index_t warmup_epochs = 10;
  index_t batch = 256;  ///< pairs of sentences
  noam_rate rate{512.0, 128000.0, 2.0};
  adam_options optimizer{.beta1 = 0.9, .beta2 = 0.98, .eps = 1e-9};
  label_smoothing smoothing{0.1, smoothing_kind::wrong_classes};
  double dropout = 0.1;
  index_t largest_length = 100;  ///< tokens of a sentence
  index_t smallest_count = 3;    ///< occurrences in the training text below which a word is unknown
  index_t beams = 5;             ///< hypotheses of beam search
  double length_penalty = 0.7;   ///< alpha of beam_length_penalty
};
/// Hyperparameters for Multi30k of the published code of Wang et al. (Pufferfish, MLSys 2021).
inline translation_recipe multi30k_recipe() { return {}; }

PUFFERFISH_NAMESPACE_END
