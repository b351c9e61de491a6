// A row at a time: maximum and normaliser in vector passes; the kept set as one threshold (weight, token); the draw in
// order of token id.
#include "sampling/sample.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/cpu/parallel.h"
#include "common/cpu/vec.h"
#include "common/philox.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

// Below this, 1 / temperature is no longer a finite number, and the distribution has long been a single peak.
constexpr float kGreedy = 1e-30f;

struct Candidate {
  float weight;
  int64_t token;
};

// Kept are the tokens that do not come after `last` in the order (weight descending, token ascending).
bool comes_before(const Candidate& a, const Candidate& b) {
  return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
}

class Row {
 public:
  Row(const SampleParams& p, int64_t row) : p_(p), row_(row), logits_(p.logits + row * p.vocab) {}

  void run() {
    find_maximum();
    int64_t token = argmax();
    if (p_.temperature[row_] >= kGreedy) token = draw();
    p_.tokens[row_] = token;
    p_.logprobs[row_] = logits_[token] - maximum_ - static_cast<float>(std::log(exponentials(1.0f, nullptr)));
  }

 private:
  void find_maximum() {
    f32v largest = broadcast(-INFINITY);
    i32v nan{};
    for_each_vector(p_.vocab, [&](int64_t i, int64_t lanes) {
      f32v v = load_lanes(logits_ + i, lanes);
      if (lanes < kLanes) v = tail(v, lanes, -INFINITY);
      nan |= v != v;
      largest = max(largest, v);
    });
    maximum_ = reduce_max(largest);
    if (reduce_max(to_f32(-nan)) > 0.0f) fail("a number in every logit, got NaN");
    if (!std::isfinite(maximum_)) fail("a finite largest logit, got " + std::to_string(maximum_));
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error("sample: logits row " + std::to_string(row_) + " must have " + what);
  }

  static f32v tail(f32v v, int64_t lanes, float filler) {
    for (int64_t i = lanes; i < kLanes; ++i) v[i] = filler;
    return v;
  }

  int64_t argmax() const {
    int64_t token = 0;
    while (logits_[token] != maximum_) ++token;
    return token;
  }

  // Sum of exp((logit - maximum) * scale), each stored to `weights` unless that is null. Added up in double precision.
  double exponentials(float scale, float* weights) const {
    double total = 0.0;
    for_each_vector(p_.vocab, [&](int64_t i, int64_t lanes) {
      f32v v = exp((load_lanes(logits_ + i, lanes) - maximum_) * scale);
      if (lanes < kLanes) v = tail(v, lanes, 0.0f);
      if (weights != nullptr) store_lanes(weights + i, v, lanes);
      total += static_cast<double>(reduce_add(v));
    });
    return total;
  }

  int64_t draw() {
    weights_ = scratch_array<float>(0, p_.vocab);
    double mass = exponentials(1.0f / p_.temperature[row_], weights_);
    Candidate last{std::max(p_.min_p[row_], 1e-45f), p_.vocab};  // weights are relative to the largest, which is 1
    if (p_.min_p[row_] > 0.0f) mass = kept_mass(last);
    if (p_.top_k[row_] > 0 || p_.top_p[row_] < 1.0f) last = rank(last, mass);
    const double target = Philox(p_.seeds[row_], p_.positions[row_]).uniform() * kept_mass(last);
    double cumulative = 0.0;
    int64_t chosen = 0;
    for (int64_t token = 0; token < p_.vocab; ++token) {
      if (comes_before(last, {weights_[token], token})) continue;
      chosen = token;
      cumulative += weights_[token];
      if (cumulative > target) break;
    }
    return chosen;  // rounding can leave the cumulative sum short of the target: then the last kept token
  }

  double kept_mass(const Candidate& last) const {
    double mass = 0.0;
    for (int64_t token = 0; token < p_.vocab; ++token) {
      if (!comes_before(last, {weights_[token], token})) mass += weights_[token];
    }
    return mass;
  }

  // The last token that top-k and top-p keep of those up to `last`, whose weights add up to `mass`. Sorts no more of
  // the vocabulary than it needs: the weights fall into bands, each sorted when it is reached.
  Candidate rank(const Candidate& last, double mass) {
    const int64_t k = p_.top_k[row_] > 0 ? std::min<int64_t>(p_.top_k[row_], p_.vocab) : p_.vocab;
    const double top_p = p_.top_p[row_];
    const bool needs_all_k = p_.top_k[row_] > 0;  // top-p counts within top-k's mass, known only at its end
    std::vector<Candidate> ranked;
    double cumulative = 0.0;
    float above = INFINITY;
    for (const float band : {0.1f, 0.01f, 1e-3f, 1e-4f, 1e-6f, 0.0f}) {
      const float floor = std::max(band, last.weight);
      const auto begin = static_cast<int64_t>(ranked.size());
      for (int64_t token = 0; token < p_.vocab; ++token) {
        if (weights_[token] >= floor && weights_[token] < above) ranked.push_back({weights_[token], token});
      }
      std::sort(ranked.begin() + begin, ranked.end(), comes_before);
      if (static_cast<int64_t>(ranked.size()) > k) ranked.resize(k);
      for (auto it = ranked.begin() + begin; it != ranked.end(); ++it) cumulative += it->weight;
      above = floor;
      if (static_cast<int64_t>(ranked.size()) == k || floor == last.weight) break;
      if (!needs_all_k && cumulative >= top_p * mass) break;
    }
    if (needs_all_k) mass = cumulative;
    cumulative = 0.0;
    for (const Candidate& candidate : ranked) {
      cumulative += candidate.weight;
      if (cumulative >= top_p * mass) return candidate;
    }
    return ranked.back();
  }

  const SampleParams& p_;
  const int64_t row_;
  const float* logits_;
  float* weights_ = nullptr;
  float maximum_ = 0.0f;
};

}  // namespace

void sample(const SampleParams& p) {
  parallel_for(p.rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) Row(p, row).run();
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
