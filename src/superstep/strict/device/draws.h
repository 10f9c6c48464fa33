// Random numbers: a generator has a seed and an offset, as CUDA's have, and each device has one of its own.
// What a call draws follows from these when it is issued, whenever it runs.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include "state.h"

namespace strict {

constexpr uint64_t FIRST_SEED = 67280421310721;  // torch's c10::detail default_rng_seed_val
constexpr uint64_t STRIDE = 4;                   // Philox gives four numbers at once, and so offsets are in fours
constexpr int MOST_DEVICES = 127;                // that c10::DeviceIndex can name

// As aten/src/ATen/cuda/CUDAGeneratorImpl.cpp has it, the state of 16 bytes too. Whoever calls holds its mutex.
struct DeviceGenerator final : public c10::GeneratorImpl {
  uint64_t from_seed = FIRST_SEED, at_offset = 0;
  explicit DeviceGenerator(int device) : c10::GeneratorImpl({CUDA, c10::DeviceIndex(device)}, c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  static c10::DeviceType device_type() { return CUDA; }

  void set_current_seed(uint64_t seed) override { from_seed = seed, at_offset = 0; }
  uint64_t current_seed() const override { return from_seed; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return from_seed;
  }
  uint64_t get_offset() const override { return at_offset; }
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset % STRIDE == 0, "offset must be a multiple of 4, not ", offset);
    at_offset = offset;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto bytes = at::empty({2 * int64_t(sizeof(uint64_t))}, at::TensorOptions(at::kCPU).dtype(at::kByte));
    memcpy(bytes.mutable_data_ptr(), &from_seed, sizeof from_seed);
    memcpy(bytes.mutable_data_ptr<uint8_t>() + sizeof from_seed, &at_offset, sizeof at_offset);
    return bytes.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& bytes) override {
    at::detail::check_rng_state(bytes);
    TORCH_CHECK(bytes.numel() == 2 * sizeof(uint64_t), "RNG state is wrong size");
    uint64_t offset;
    memcpy(&offset, static_cast<const uint8_t*>(bytes.data()) + sizeof from_seed, sizeof offset);
    set_offset(offset);
    memcpy(&from_seed, bytes.data(), sizeof from_seed);
  }
  DeviceGenerator* clone_impl() const override {
    auto* made = new DeviceGenerator(device().index());
    made->from_seed = from_seed, made->at_offset = at_offset;
    return made;
  }
};

inline const at::Generator& default_generator(int device) {
  static auto& generators = *new std::vector<at::Generator>([] {
    std::vector<at::Generator> made;
    for (int each = 0; each < MOST_DEVICES; each++) made.push_back(at::make_generator<DeviceGenerator>(each));
    return made;
  }());
  return generators.at(device < 0 ? current_device : device);
}

// A step of splitmix64 (Steele, Lea, Flood 2014): seeds that are near give streams that are not.
inline uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// The seed of the numbers that the next call draws.
inline uint64_t next_seed(const at::Generator& generator) {
  auto* from = at::check_generator<DeviceGenerator>(generator);
  std::lock_guard lock(from->mutex_);
  from->at_offset += STRIDE;
  return mixed(mixed(from->from_seed) ^ (from->at_offset / STRIDE));
}

// Of the task that runs, where its operator draws and has no generator for it.
inline thread_local int64_t task_seed = 0;

// Attention that drops: its backward pass is given what its forward pass drew.
inline int64_t seed_of_dropout(const c10::FunctionSchema& schema, int device, const std::vector<c10::IValue>& arguments) {
  auto at = schema.argumentIndexWithName("dropout_p");
  bool draws = at && arguments[*at].isDouble() && arguments[*at].toDouble() > 0 && schema.name().find("backward") == std::string::npos;
  return draws ? int64_t(next_seed(default_generator(device)) >> 1) : 0;
}

// Gives a call that draws a CPU's generator for what is next of its own generator, or of its device's.
inline void give_generator(const c10::FunctionSchema& schema, int device, std::vector<c10::IValue>& arguments) {
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& type = schema.arguments()[i].type();
    bool is_generator = type->kind() == c10::TypeKind::OptionalType && type->containedType(0)->kind() == c10::TypeKind::GeneratorType;
    if (is_generator)
      arguments[i] = at::detail::createCPUGenerator(next_seed(arguments[i].isNone() ? default_generator(device) : arguments[i].toGenerator()));
  }
}

}  // namespace strict
