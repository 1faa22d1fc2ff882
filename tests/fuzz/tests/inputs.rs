//! Passes random inputs to the readers in each test run: [`DEFAULT_INPUT_COUNT`] of them in `cargo
//! test`, ten million in `cargo xtask test`.

/// Number of inputs if `SEMPA_FUZZ_INPUTS` is not set. The test then runs for one or two seconds.
const DEFAULT_INPUT_COUNT: u64 = 200_000;
/// The readers of images get the inputs divided by this number, because they use the file system.
const IMAGES_DIVISOR: u64 = 100;

/// Returns the number of inputs and the generator of inputs.
fn input_settings() -> (u64, sempa_fuzz::InputRng) {
    let env_number = |name: &str, default_number: u64| {
        let variable = std::env::var(name).ok();
        variable
            .and_then(|text| text.parse().ok())
            .unwrap_or(default_number)
    };
    let input_count = env_number("SEMPA_FUZZ_INPUTS", DEFAULT_INPUT_COUNT);
    let seed = env_number("SEMPA_FUZZ_SEED", 1).max(1);
    println!("SEMPA_FUZZ_INPUTS={input_count} SEMPA_FUZZ_SEED={seed}");
    (input_count, sempa_fuzz::InputRng(seed))
}

/// No reader panics on random bytes.
#[test]
fn random_inputs_cause_no_panic() {
    let (input_count, mut rng) = input_settings();
    for _ in 0..input_count {
        sempa_fuzz::read_input(&rng.next_random_input());
    }
}

/// Random images give no process another user, and create no file outside of their directory.
#[test]
fn random_images_are_harmless() {
    let (input_count, mut rng) = input_settings();
    let mut accepted_count = 0;
    for _ in 0..input_count / IMAGES_DIVISOR {
        if let [order, body @ ..] = &*rng.next_random_input() {
            accepted_count += u64::from(sempa_fuzz::images::read_images(*order, body));
        }
    }
    // Otherwise no input would reach the checks of accepted images.
    assert!(accepted_count > 0, "every input is refused");
    println!("{accepted_count} altered sets of images accepted");
    sempa_fuzz::images::remove_directory();
}
