//! Passes random inputs to the readers in each test run: [`DEFAULT_INPUT_COUNT`] of them in `cargo
//! test`, ten million in `cargo xtask test`.

/// Number of inputs if `SEMPA_FUZZ_INPUTS` is not set. They take one or two seconds.
const DEFAULT_INPUT_COUNT: u64 = 200_000;

/// No reader panics on random bytes.
#[test]
fn random_inputs_break_nothing() {
    let number = |name: &str, usual: u64| {
        let given = std::env::var(name).ok();
        given.and_then(|text| text.parse().ok()).unwrap_or(usual)
    };
    let count = number("SEMPA_FUZZ_INPUTS", DEFAULT_INPUT_COUNT);
    let seed = number("SEMPA_FUZZ_SEED", 1).max(1);
    println!("SEMPA_FUZZ_INPUTS={count} SEMPA_FUZZ_SEED={seed}");
    let mut dice = sempa_fuzz::InputRng(seed);
    for _ in 0..count {
        sempa_fuzz::read_input(&dice.next_input());
    }
}
