// A row at a time, in vector passes over blocks of 64 tokens that skip what is not kept. The kept set is one threshold
// (logit, token), found by selection among as few of the largest logits as hold it; the draw is in order of token id.
#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "common/cpu/parallel.h"
#include "common/cpu/vec.h"
#include "sampling/philox.h"
#include "sampling/sample.h"
#include "sampling/sample_filters.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

constexpr int64_t kBlock = 64;
enum Scratch { kMasses, kModified, kCandidates };

FASTINFER_INLINE i32v lane_ids() {
  i32v ids;
  for (int i = 0; i < kLanes; ++i) ids[i] = i;
  return ids;
}

struct Candidate {
  float z;
  float weight;
  int32_t token;
};

bool comes_before(const Candidate& a, const Candidate& b) {
  return a.z != b.z ? a.z > b.z : a.token < b.token;
}

double mass_of(const Candidate* begin, const Candidate* end) {
  return std::accumulate(begin, end, 0.0, [](double mass, const Candidate& c) { return mass + c.weight; });
}

FASTINFER_INLINE bool any(i32v mask) {
  uint64_t words[kLanes / 2], all = 0;
  store_as(words, mask);
  for (const uint64_t word : words) all |= word;
  return all != 0;
}

// A row of logits, modified or not.
class Logits {
 public:
  Logits(const float* z, int64_t vocab) : z_(z), vocab_(vocab) {}

  float operator[](int64_t token) const {
    return z_[token];
  }

  // The block from `token` on. The row's last, incomplete one is copied to `room` and filled up with -inf.
  const float* block(int64_t token, float (&room)[kBlock]) const {
    if (token + kBlock <= vocab_) return z_ + token;
    std::fill(std::copy(z_ + token, z_ + vocab_, room), room + kBlock, -INFINITY);
    return room;
  }

  // Calls fn(first token, its 64 logits).
  template <class Fn>
  FASTINFER_INLINE void for_each_block(Fn&& fn) const {
    int64_t token = 0;
    for (; token + kBlock <= vocab_; token += kBlock) fn(token, z_ + token);
    float room[kBlock];
    if (token < vocab_) fn(token, block(token, room));
  }

  // The same for blocks where a logit is at least `lowest`.
  template <class Fn>
  FASTINFER_INLINE void for_each_block_from(float lowest, Fn&& fn) const {
    for_each_block([&](int64_t token, const float* z) {
      i32v found{};
      for (int64_t i = 0; i < kBlock; i += kLanes) found |= load(z + i) >= lowest;
      if (any(found)) fn(token, z);
    });
  }

  // Throws unless the row has numbers only and a finite maximum.
  float maximum(int64_t row, const char* name) const {
    f32v largest = broadcast(-INFINITY);
    i32v nan{};
    for_each_block([&](int64_t, const float* z) {
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        const f32v v = load(z + i);
        nan |= v != v;
        largest = max(largest, v);
      }
    });
    const float found = reduce_max(largest);
    const std::string where = std::string("sample: ") + name + " row " + std::to_string(row) + " must have ";
    if (any(nan)) throw std::runtime_error(where + "a number in every logit, got NaN");
    if (!std::isfinite(found)) throw std::runtime_error(where + "a finite largest logit, got " + std::to_string(found));
    return found;
  }

 private:
  const float* z_;
  int64_t vocab_;
};

// The softmax of a row at a temperature, of what is kept: masses relative to that of the maximum.
class Distribution {
 public:
  Distribution(const Logits& logits, int64_t vocab, float maximum, float temperature)
      : logits_(logits), vocab_(vocab), maximum_(maximum), scale_(1.0f / temperature) {}

  FASTINFER_INLINE f32v weights(f32v z) const {
    return exp((z - maximum_) * scale_);
  }

  FASTINFER_INLINE f32v kept_weights(f32v z, int64_t token, const LastKept& last) const {
    const i32v rest = static_cast<int32_t>(last.token - token) - lane_ids();  // tokens until the last
    return select((z > last.z) | ((z == last.z) & (rest >= 0)), weights(z), f32v{});
  }

  // The mass of all tokens.
  double mass() const {
    double total = 0.0;
    logits_.for_each_block([&](int64_t, const float* z) {
      f32v sum{};
      for (int64_t i = 0; i < kBlock; i += kLanes) sum += weights(load(z + i));
      total += static_cast<double>(reduce_add(sum));
    });
    return total;
  }

  // Leaves each block's mass in `masses`, unless that is null, and returns their sum.
  double mass(const LastKept& last, float* masses) const {
    double total = 0.0;
    if (masses != nullptr) std::fill_n(masses, (vocab_ + kBlock - 1) / kBlock, 0.0f);
    logits_.for_each_block_from(last.z, [&](int64_t token, const float* z) {
      f32v sum{};
      for (int64_t i = 0; i < kBlock; i += kLanes) sum += kept_weights(load(z + i), token + i, last);
      const float mass = reduce_add(sum);
      if (masses != nullptr) masses[token / kBlock] = mass;
      total += mass;
    });
    return total;
  }

  // The token at which the running total of what is kept reaches the share u.
  int64_t draw(const LastKept& last, double u) const {
    const int64_t blocks = (vocab_ + kBlock - 1) / kBlock;
    auto* masses = scratch_array<float>(kMasses, blocks);
    double left = u * mass(last, masses);
    int64_t chosen = -1;
    for (int64_t block = 0; block < blocks; ++block) {
      if (masses[block] == 0.0f) continue;
      if (chosen >= 0) left -= masses[chosen];
      chosen = block;
      if (left <= masses[block]) break;
    }
    return draw_in_block(chosen * kBlock, last, left);
  }

 private:
  // Rounding can leave the total short of `left`: then the last that is kept.
  int64_t draw_in_block(int64_t token, const LastKept& last, double left) const {
    float room[kBlock], weights[kBlock];
    const float* z = logits_.block(token, room);
    for (int64_t i = 0; i < kBlock; i += kLanes) store(weights + i, kept_weights(load(z + i), token + i, last));
    int64_t found = 0;
    for (int64_t i = 0; i < kBlock; ++i) {
      if (weights[i] == 0.0f) continue;
      found = i;
      left -= weights[i];
      if (left <= 0.0) break;
    }
    return token + found;
  }

  const Logits& logits_;
  const int64_t vocab_;
  const float maximum_;
  const float scale_;
};

// Finds where top-k and top-p end among a row's largest logits.
class Selection {
 public:
  Selection(const Logits& logits, int64_t vocab, float maximum, const Distribution& distribution)
      : logits_(logits), maximum_(maximum), distribution_(distribution) {
    candidates_ = scratch_array<Candidate>(kCandidates, vocab + 1);  // one more: see collect
  }

  // The last token that is kept of those up to `last`. Candidates come in bands of the logit, in temperatures below the
  // maximum, until they hold k tokens or the share top_p of the mass: with neither more than needed, nor sorted.
  LastKept last(LastKept last, float temperature, int64_t k, double top_p) {
    double wanted_mass = k > 0 ? INFINITY : top_p * distribution_.mass(last, nullptr);
    double mass = 0.0;
    float above = INFINITY;
    for (const float depth : {2.0f, 5.0f, 10.0f, 16.0f, INFINITY}) {
      const float floor = std::max(maximum_ - temperature * depth, last.z);
      const int64_t before = size_;
      collect(floor, above);
      mass += mass_of(candidates_ + before, candidates_ + size_);
      if ((k > 0 && size_ >= k) || mass >= wanted_mass || floor == last.z) break;
      above = floor;
    }
    if (k > 0 && size_ >= k) {
      std::nth_element(candidates_, candidates_ + k - 1, candidates_ + size_, comes_before);
      size_ = k;
      last = {candidates_[k - 1].z, candidates_[k - 1].token};
    }
    if (top_p >= 1.0) return last;
    if (k > 0) wanted_mass = top_p * mass_of(candidates_, candidates_ + size_);
    const Candidate& found = reaching(wanted_mass);
    return {found.z, found.token};
  }

 private:
  // Appends the tokens with floor <= z < above.
  void collect(float floor, float above) {
    logits_.for_each_block_from(floor, [&](int64_t token, const float* block) {
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        const f32v z = load(block + i);
        const i32v wanted = (z >= floor) & (z < above);
        if (!any(wanted)) continue;
        const f32v weights = distribution_.weights(z);
        for (int lane = 0; lane < kLanes; ++lane) {
          candidates_[size_] = {z[lane], weights[lane], static_cast<int32_t>(token + i) + lane};
          size_ += wanted[lane] & 1;  // no branch, as it would be unpredictable: what is not wanted is overwritten
        }
      }
    });
  }

  // The candidate with which those before it weigh `wanted`: halves of what may hold it, neither sorted.
  const Candidate& reaching(double wanted) {
    Candidate *begin = candidates_, *end = candidates_ + size_;
    while (end - begin > 32) {
      Candidate* middle = begin + (end - begin) / 2;
      std::nth_element(begin, middle, end, comes_before);
      const double mass = mass_of(begin, middle);
      if (mass >= wanted) {
        end = middle;
      } else {
        wanted -= mass;
        begin = middle;
      }
    }
    std::sort(begin, end, comes_before);
    for (const Candidate* c = begin; c < end - 1; ++c) {
      wanted -= c->weight;
      if (wanted <= 0.0) return *c;
    }
    return end[-1];
  }

  const Logits& logits_;
  const float maximum_;
  const Distribution& distribution_;
  Candidate* candidates_;
  int64_t size_ = 0;
};

// Forbids those of 32 tokens whose bit is 0.
FASTINFER_INLINE void apply_mask(int32_t word, float* z) {
  const i32v lane_bits = (i32v{} + 1) << lane_ids();
#pragma GCC unroll 8
  for (int i = 0; i < 32; i += kLanes) {
    const i32v allowed = ((i32v{} + (word >> i)) & lane_bits) != 0;
    store(z + i, select(allowed, load(z + i), broadcast(-INFINITY)));
  }
}

// Penalties and mask, 32 tokens at a time; words of tokens that nothing concerns are copied. Biases come last: what the
// mask forbids, no bias allows again.
void modify(const SampleParams& p, int64_t row, float* modified) {
  const float* logits = p.logits + row * p.vocab;
  const int32_t* counts = p.output_counts != nullptr ? p.output_counts + row * p.vocab : nullptr;
  const int32_t* prompt = p.prompt_mask != nullptr ? p.prompt_mask + row * p.mask_words : nullptr;
  const int32_t* mask = p.mask != nullptr ? p.mask + row * p.mask_words : nullptr;
  for (int64_t begin = 0; begin < p.vocab; begin += 32) {
    const int64_t end = std::min(begin + 32, p.vocab), word = begin / 32;
    if (mask != nullptr && mask[word] == 0) {
      std::fill(modified + begin, modified + end, -INFINITY);
      continue;
    }
    std::copy(logits + begin, logits + end, modified + begin);
    int32_t penalised_tokens = prompt != nullptr ? prompt[word] : 0;
    if (counts != nullptr) {
      for (int64_t i = begin; i < end; ++i) penalised_tokens |= counts[i];
    }
    for (int64_t i = begin; i < end && penalised_tokens != 0; ++i) {
      const bool in_prompt = prompt != nullptr && bit_of(prompt, i);
      modified[i] = penalised(modified[i], in_prompt, counts != nullptr ? counts[i] : 0, p.penalties + 3 * row);
    }
    if (mask != nullptr && mask[word] != -1) apply_mask(mask[word], modified + begin);
  }
  if (p.bias_start == nullptr) return;
  const BiasRange biases(p, row);
  for (int64_t i = biases.begin; i < biases.end; ++i) {
    if (makes_sense(p, i)) modified[p.bias_tokens[i]] += p.bias_values[i];
  }
}

// The likeliest tokens, sorted by insertion.
void top_logprobs(const SampleParams& p, int64_t row, const Logits& logits, float maximum, float log_mass) {
  int64_t* tokens = p.top_tokens + row * p.num_logprobs;
  float* values = p.top_logprobs + row * p.num_logprobs;
  std::fill_n(tokens, p.num_logprobs, -1);
  std::fill_n(values, p.num_logprobs, -INFINITY);
  float& least = values[p.num_logprobs - 1];
  logits.for_each_block([&](int64_t first, const float* z) {
    i32v found{};
    for (int64_t i = 0; i < kBlock; i += kLanes) found |= load(z + i) > least;
    if (!any(found)) return;
    for (int64_t i = 0; i < kBlock; ++i) {
      if (!(z[i] > least)) continue;
      int64_t place = p.num_logprobs - 1;
      for (; place > 0 && z[i] > values[place - 1]; --place) {
        values[place] = values[place - 1];
        tokens[place] = tokens[place - 1];
      }
      values[place] = z[i];
      tokens[place] = first + i;
    }
  });
  for (int64_t i = 0; i < p.num_logprobs; ++i) values[i] = values[i] - maximum - log_mass;
}

int64_t argmax(const Logits& logits, float maximum) {
  float room[kBlock];
  for (int64_t token = 0;; token += kBlock) {
    const float* z = logits.block(token, room);
    i32v found{};
    for (int64_t i = 0; i < kBlock; i += kLanes) found |= load(z + i) == maximum;
    if (any(found)) return token + (std::find(z, z + kBlock, maximum) - z);
  }
}

int64_t draw(const SampleParams& p, int64_t row, const Logits& logits, float maximum) {
  const Distribution distribution(logits, p.vocab, maximum, p.temperature[row]);
  LastKept last{lowest_kept(maximum, p.temperature[row], p.min_p[row]), static_cast<int32_t>(p.vocab)};
  if (p.top_k[row] > 0 || p.top_p[row] < 1.0f) {
    Selection selection(logits, p.vocab, maximum, distribution);
    last = selection.last(last, p.temperature[row], p.top_k[row], p.top_p[row]);
  }
  return distribution.draw(last, Philox(p.seeds[row], p.positions[row]).uniform());
}

void sample_row(const SampleParams& p, int64_t row) {
  const Logits raw(p.logits + row * p.vocab, p.vocab);
  const float raw_maximum = raw.maximum(row, "logits");
  Logits logits = raw;
  float maximum = raw_maximum;
  if (p.penalties != nullptr || p.bias_start != nullptr || p.mask != nullptr) {
    auto* modified = scratch_array<float>(kModified, (p.vocab + 31) / 32 * 32);  // whole words of the mask
    modify(p, row, modified);
    logits = Logits(modified, p.vocab);
    maximum = logits.maximum(row, "penalised, biased and masked logits");
  }
  const bool greedy = p.temperature[row] < kGreedyTemperature;
  const int64_t token = greedy ? argmax(logits, maximum) : draw(p, row, logits, maximum);
  p.tokens[row] = token;
  if (p.logprobs == nullptr) return;
  const Distribution likelihood(raw, p.vocab, raw_maximum, 1.0f);
  const auto log_mass = static_cast<float>(std::log(likelihood.mass()));
  p.logprobs[row] = raw[token] - raw_maximum - log_mass;
  if (p.num_logprobs > 0) top_logprobs(p, row, raw, raw_maximum, log_mass);
}

}  // namespace

void sample(const SampleParams& p) {
  parallel_for(p.rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) sample_row(p, row);
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
