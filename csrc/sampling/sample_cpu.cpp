// A row at a time, in vector passes over blocks of 64 tokens that skip what is not kept. The kept set is one threshold
// (logit, token), found by selection among as few of the largest logits as hold it; then the tokens that are kept race
// (race.h).
#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "common/cpu/parallel.h"
#include "common/cpu/vec.h"
#include "sampling/philox_cpu.h"
#include "sampling/race.h"
#include "sampling/sample.h"
#include "sampling/sample_filters.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

constexpr int64_t kBlock = 64;
static_assert(kBlock == kNoiseBlock);
enum Scratch { kModified, kCandidates };

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

// The largest logit of a row, and the first token that has it.
struct Peak {
  float z;
  int32_t token;
};

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
  Peak peak(int64_t row, const char* name) const {
    f32v largest = broadcast(-INFINITY);
    i32v nan{}, blocks{};  // where each lane's largest is
    for_each_block([&](int64_t token, const float* z) {
      f32v top = broadcast(-INFINITY);
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        const f32v v = load(z + i);
        nan |= v != v;
        top = max(top, v);
      }
      blocks = top > largest ? i32v{} + static_cast<int32_t>(token) : blocks;
      largest = max(largest, top);
    });
    const float found = reduce_max(largest);
    const std::string where = std::string("sample: ") + name + " row " + std::to_string(row) + " must have ";
    if (any(nan)) throw std::runtime_error(where + "a number in every logit, got NaN");
    if (!std::isfinite(found)) throw std::runtime_error(where + "a finite largest logit, got " + std::to_string(found));
    int32_t first = INT32_MAX;
    for (int lane = 0; lane < kLanes; ++lane) {
      if (largest[lane] == found) first = std::min(first, blocks[lane]);
    }
    float room[kBlock];
    const float* z = block(first, room);
    return {found, first + static_cast<int32_t>(std::find(z, z + kBlock, found) - z)};
  }

 private:
  const float* z_;
  int64_t vocab_;
};

// The softmax of a row at a temperature, of what is kept: masses relative to that of the maximum.
class Distribution {
 public:
  Distribution(const Logits& logits, float maximum, float temperature)
      : logits_(logits), maximum_(maximum), scale_(1.0f / temperature) {}

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

  // The mass of what is kept.
  double mass(const LastKept& last) const {
    double total = 0.0;
    logits_.for_each_block_from(last.z, [&](int64_t token, const float* z) {
      f32v sum{};
      for (int64_t i = 0; i < kBlock; i += kLanes) sum += kept_weights(load(z + i), token + i, last);
      total += reduce_add(sum);
    });
    return total;
  }

 private:
  const Logits& logits_;
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
    double wanted_mass = k > 0 ? INFINITY : top_p * distribution_.mass(last);
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

  // Adds the tokens that are kept, if they are among few candidates: a pass over the row would take longer.
  bool race_few(Race& race, const TokenNoise& noise, float temperature, const LastKept& last) const {
    if (size_ > kFew) return false;
    for (const Candidate* c = candidates_; c < candidates_ + size_; ++c) {
      if (!last.keeps(c->z, c->token)) continue;
      const double weight = race_weight(c->z, maximum_, temperature);
      race.add(arrival(noise, c->token, noise.block_word(c->token), weight, race.time), c->token);
    }
    return true;
  }

 private:
  static constexpr int64_t kFew = 256;

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

// The words of consecutive blocks' noise, made for several blocks at once.
class BlockWords {
 public:
  explicit BlockWords(const TokenNoise& noise) : noise_(noise) {}

  // For the block from `token` on, a bound 0.01 below log2 of its least noise.
  float log2_bound(int64_t token) {
    make(token);
    return bounds_[token / kNoiseBlock % kCount];
  }

  BlockWord operator[](int64_t token) {
    make(token);
    return words_[token / kNoiseBlock % kCount];
  }

 private:
  static constexpr int64_t kCount = 4 * kPhiloxLanes;

  void make(int64_t token) {
    const int64_t batch = token / (kCount * kNoiseBlock);
    if (batch == batch_) return;
    batch_ = batch;
    philox(noise_.seed, noise_.position, static_cast<uint32_t>(batch * kPhiloxLanes), kBlockStream, words_);
    for (int64_t i = 0; i < kCount; i += kLanes) {
      const f32v least = to_f32((i32v)(load_as<u32v>(words_ + i) >> 6)) + 0.5f;
      // The bits of a float, as a number, are its binary logarithm or up to 0.09 less: the mantissa instead of its
      // logarithm.
      store(bounds_ + i, to_f32((i32v)least) * 0x1p-23f - (127.0f + 26.0f + 6.0f + 0.01f));
    }
  }

  const TokenNoise& noise_;
  int64_t batch_ = -1;
  BlockWord words_[kCount];
  float bounds_[kCount];
};

// Adds the tokens that are kept. The likeliest comes first, as few can then still beat it.
void race_row(Race& race, const TokenNoise& noise, const Logits& logits, Peak peak, float temperature,
              const LastKept& last) {
  race.add(arrival(noise, peak.token, noise.block_word(peak.token), 1.0, race.time), peak.token);
  const float unit = temperature * std::numbers::ln2_v<float>;
  auto log2_time = static_cast<float>(std::log2(race.time));
  BlockWords words(noise);
  logits.for_each_block([&](int64_t token, const float* z) {
    f32v top = load(z);
    for (int64_t i = kLanes; i < kBlock; i += kLanes) top = max(top, load(z + i));
    if (!any(top >= last.z)) return;
    // Below it a logit arrives too late even with the block's least noise.
    const float lowest = std::max(last.z, peak.z + unit * (words.log2_bound(token) - log2_time));
    if (!any(top >= lowest)) return;
    const BlockWord word = words[token];
    for (int64_t i = 0; i < kBlock; ++i) {
      const auto other = static_cast<int32_t>(token + i);
      if (z[i] < lowest || !last.keeps(z[i], other)) continue;
      race.add(arrival(noise, other, word, race_weight(z[i], peak.z, temperature), race.time), other);
    }
    log2_time = static_cast<float>(std::log2(race.time));
  });
}

int64_t draw(const SampleParams& p, int64_t row, const Logits& logits, Peak peak) {
  const float temperature = p.temperature[row];
  const TokenNoise noise{static_cast<uint64_t>(p.seeds[row]), static_cast<uint64_t>(p.positions[row])};
  Race race;
  LastKept last{lowest_kept(peak.z, temperature, p.min_p[row]), static_cast<int32_t>(p.vocab)};
  if (p.top_k[row] > 0 || p.top_p[row] < 1.0f) {
    const Distribution distribution(logits, peak.z, temperature);
    Selection selection(logits, p.vocab, peak.z, distribution);
    last = selection.last(last, temperature, p.top_k[row], p.top_p[row]);
    if (selection.race_few(race, noise, temperature, last)) return race.token;
  }
  race_row(race, noise, logits, peak, temperature, last);
  return race.token;
}

void sample_row(const SampleParams& p, int64_t row) {
  const Logits raw(p.logits + row * p.vocab, p.vocab);
  const Peak raw_peak = raw.peak(row, "logits");
  Logits logits = raw;
  Peak peak = raw_peak;
  if (p.penalties != nullptr || p.bias_start != nullptr || p.mask != nullptr) {
    auto* modified = scratch_array<float>(kModified, (p.vocab + 31) / 32 * 32);  // whole words of the mask
    modify(p, row, modified);
    logits = Logits(modified, p.vocab);
    peak = logits.peak(row, "penalised, biased and masked logits");
  }
  const bool greedy = p.temperature[row] < kGreedyTemperature;
  const int64_t token = greedy ? peak.token : draw(p, row, logits, peak);
  p.tokens[row] = token;
  if (p.logprobs == nullptr) return;
  const Distribution likelihood(raw, raw_peak.z, 1.0f);
  const auto log_mass = static_cast<float>(std::log(likelihood.mass()));
  p.logprobs[row] = raw[token] - raw_peak.z - log_mass;
  if (p.num_logprobs > 0) top_logprobs(p, row, raw, raw_peak.z, log_mass);
}

}  // namespace

void sample(const SampleParams& p) {
  parallel_for(p.rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) sample_row(p, row);
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
