//! The steps of a campaign.

use crate::runner::Test;
use crate::setup;
use crate::skips::Skips;
use std::path::PathBuf;

/// The parts in the order in which they run: those that find most in little time first.
pub(super) const PARTS: [&str; 9] = [
    "models",
    "fuzz",
    "properties",
    "lies",
    "conformance",
    "limits",
    "matrices",
    "soak",
    "release",
];

/// Steps of the fuzzer and random inputs of each: 10^8 in all.
const FUZZ_STEPS: u64 = 10;
const FUZZ_INPUTS: &str = "10000000";
/// Cases of each property; proptest's own number is 256.
const PROPERTY_CASES: &str = "4096";
/// Seeds with which each test of the parts `lies` and `properties` runs.
const SEEDS: u64 = 3;

/// Binaries whose tests have longer lists with `SEMPA_TEST_FULL`, and all others that belong to a
/// part.
const BINARIES: [(&str, &[&str]); 5] = [
    (
        "lies",
        &["sempa-tests::lying_engines", "sempa-tests::lying_moves"],
    ),
    ("conformance", &["sempa-tests::conformance"]),
    ("limits", &["sempa-tests::limits", "sempa-tests::loss"]),
    (
        "matrices",
        &[
            "sempa-tests::move_faults",
            "sempa-tests::checkpoint_faults",
            "sempa-tests::post_copy",
            "sempa-tests::routes",
            "sempa-tests::talk",
            "pvm-tasker::kills",
        ],
    ),
    ("soak", &["sempa-tests::soak"]),
];

/// Packages with properties that proptest tries.
const PROPERTY_PACKAGES: [&str; 6] = [
    "sempa-proto",
    "libpvm",
    "checkpoint",
    "pvmd",
    "pvm-rm",
    "pvm-load-watcher",
];

/// One program to run. The step passes if the program succeeds.
pub(super) struct Step {
    /// Its name in the journal: the part, then a description.
    pub(super) id: String,
    pub(super) part: &'static str,
    pub(super) program: PathBuf,
    pub(super) words: Vec<String>,
    pub(super) folder: PathBuf,
    pub(super) env: Vec<(&'static str, String)>,
    /// The reason if the machine lacks what it needs.
    pub(super) skip: Option<String>,
}

impl Step {
    /// Returns the file name of its log.
    pub(super) fn file_name(&self) -> String {
        self.id.replace(['/', ':', ' '], "-")
    }

    /// Returns a step for a test with its own seed.
    fn of(part: &'static str, test: &Test, seed: u64, skips: &mut Skips) -> Step {
        let skip = test.ignored.then(|| skips.reason(&test.binary, &test.name));
        Step {
            id: format!("{part}/{}/{}/{seed}", test.binary, test.name),
            part,
            program: test.path.clone(),
            words: words(&["--exact", &test.name, "--include-ignored", "--nocapture"]),
            folder: test.folder.clone(),
            env: vec![("SEMPA_TEST_SEED", seed.to_string())],
            skip: skip.flatten(),
        }
    }

    /// Returns a step that runs cargo in the project.
    fn cargo(part: &'static str, name: &str, line: &[&str]) -> Step {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        Step {
            id: format!("{part}/{name}"),
            part,
            program: cargo.into(),
            words: words(line),
            folder: setup::project(),
            env: Vec::new(),
            skip: None,
        }
    }
}

fn words(line: &[&str]) -> Vec<String> {
    line.iter().map(|word| word.to_string()).collect()
}

/// Returns all steps, in the order of the parts.
pub(super) fn all(tests: &[Test], seed: u64, skips: &mut Skips, profile: &str) -> Vec<Step> {
    let mut steps = Vec::new();
    for part in PARTS {
        match part {
            "models" => steps.push(models(profile)),
            "fuzz" => steps.extend(fuzz(tests, seed, skips)),
            "properties" => steps.extend(properties(tests, seed, skips)),
            "release" => steps.push(release()),
            _ => steps.extend(of_binaries(part, tests, seed, skips)),
        }
        if part == "soak" {
            let line = [
                "run",
                "--locked",
                "--release",
                "-p",
                "xtask",
                "--",
                "bench",
                "soak",
            ];
            let mut soak = Step::cargo(part, "bench soak", &line);
            soak.skip = skips.reason("sempa-tests::soak", "");
            steps.push(soak);
        }
    }
    steps
}

/// Returns the step that checks rings with two threads under all interleavings, up to a number of
/// preemptions.
fn models(profile: &str) -> Step {
    let line = [
        "test",
        "--locked",
        "--profile",
        profile,
        "-p",
        "sempa-ring",
        "--features",
        "loom",
        "--test",
        "model",
    ];
    Step::cargo("models", "rings and bells", &line)
}

/// Returns steps with random inputs for all parsers, each with its own inputs.
fn fuzz(tests: &[Test], seed: u64, skips: &mut Skips) -> Vec<Step> {
    let inputs = tests
        .iter()
        .filter(|test| test.binary == "sempa-fuzz::inputs");
    let mut steps = Vec::new();
    for test in inputs {
        for number in 0..FUZZ_STEPS {
            let own = seed.wrapping_mul(FUZZ_STEPS).wrapping_add(number).max(1);
            let mut step = Step::of("fuzz", test, own, skips);
            step.env
                .push(("SEMPA_FUZZ_INPUTS", FUZZ_INPUTS.to_string()));
            step.env.push(("SEMPA_FUZZ_SEED", own.to_string()));
            steps.push(step);
        }
    }
    steps
}

/// Returns steps with the pure tests of packages with properties: more cases, and several seeds.
fn properties(tests: &[Test], seed: u64, skips: &mut Skips) -> Vec<Step> {
    let is_one = |test: &&Test| {
        let package = test.binary.split("::").next().unwrap_or_default();
        PROPERTY_PACKAGES.contains(&package) && !test.ignored
    };
    let mut binaries: Vec<&Test> = tests.iter().filter(is_one).collect();
    binaries.sort_by(|a, b| a.binary.cmp(&b.binary));
    binaries.dedup_by(|a, b| a.binary == b.binary);
    let mut steps = Vec::new();
    for test in binaries {
        for number in 0..SEEDS {
            let own = seed.wrapping_add(number);
            let mut step = Step::of("properties", test, own, skips);
            step.id = format!("properties/{}/{own}", test.binary);
            step.words = words(&["--test-threads", "2"]);
            step.env.push(("PROPTEST_RNG_SEED", own.to_string()));
            step.env
                .push(("PROPTEST_CASES", PROPERTY_CASES.to_string()));
            steps.push(step);
        }
    }
    steps
}

/// Returns the tests of the binaries of a part.
fn of_binaries(part: &'static str, tests: &[Test], seed: u64, skips: &mut Skips) -> Vec<Step> {
    let binaries = BINARIES
        .iter()
        .find(|(of, _)| *of == part)
        .map_or(&[][..], |(_, binaries)| binaries);
    let seeds = if part == "lies" { SEEDS } else { 1 };
    let mut steps = Vec::new();
    for test in tests
        .iter()
        .filter(|test| binaries.contains(&&*test.binary))
    {
        for number in 0..seeds {
            steps.push(Step::of(part, test, seed.wrapping_add(number), skips));
        }
    }
    steps
}

/// Returns the step that runs both tiers with the build that users install.
fn release() -> Step {
    let line = ["run", "--locked", "--release", "-p", "xtask", "--", "test"];
    let mut step = Step::cargo("release", "test", &line);
    step.env.push(("SEMPA_TEST_FULL", String::new()));
    step
}
