//! Passes random inputs to the readers in each test run: [`DEFAULT_INPUT_COUNT`] of them in `cargo
//! test`, ten million in `cargo xtask test`.

/// Number of inputs if `SEMPA_FUZZ_INPUTS` is not set. The test then runs for one or two seconds.
const DEFAULT_INPUT_COUNT: u64 = 200_000;

/// No reader panics on random bytes.
#[test]
fn random_inputs_cause_no_panic() {
    let env_number = |name: &str, default_number: u64| {
        let variable = std::env::var(name).ok();
        variable
            .and_then(|text| text.parse().ok())
            .unwrap_or(default_number)
    };
    let input_count = env_number("SEMPA_FUZZ_INPUTS", DEFAULT_INPUT_COUNT);
    let seed = env_number("SEMPA_FUZZ_SEED", 1).max(1);
    println!("SEMPA_FUZZ_INPUTS={input_count} SEMPA_FUZZ_SEED={seed}");
    let mut rng = sempa_fuzz::InputRng(seed);
    for _ in 0..input_count {
        sempa_fuzz::read_input(&rng.next_random_input());
    }
}
