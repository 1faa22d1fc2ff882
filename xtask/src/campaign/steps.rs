//! Lists the steps of a campaign, part by part.

use crate::runner::Test;
use crate::setup;
use crate::skips::SkipDecider;
use std::path::PathBuf;

/// The parts of a campaign in the order in which they run. The parts that find the most faults in
/// the least time come first.
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

/// Number of steps of the fuzzer.
const FUZZ_STEPS: u64 = 10;
/// Number of random inputs of each step of the fuzzer. All steps together try 10^8 inputs.
const FUZZ_INPUTS: &str = "10000000";
/// Number of cases for each property; proptest's default is 256.
const PROPERTY_CASES: &str = "4096";
/// Number of seeds with which each test of the parts `lies` and `properties` is run.
const SEEDS_PER_TEST: u64 = 3;

/// The parts that consist of tests of certain binaries, as (part, binaries). With `SEMPA_TEST_FULL`
/// many of these tests try more cases.
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

/// Packages with properties that are tested by proptest.
const PROPERTY_PACKAGES: [&str; 6] = [
    "sempa-proto",
    "libpvm",
    "checkpoint",
    "pvmd",
    "pvm-rm",
    "pvm-load-watcher",
];

/// A program to run, with its arguments. The step passes if the program exits with success.
pub(super) struct CampaignStep {
    /// Name of the step in the journal: the name of the part, a slash, and a description.
    pub(super) id: String,
    pub(super) part: &'static str,
    pub(super) program: PathBuf,
    pub(super) words: Vec<String>,
    pub(super) folder: PathBuf,
    pub(super) env: Vec<(&'static str, String)>,
    /// What the machine lacks for this step; `None` if the step can run.
    pub(super) skip: Option<String>,
}

impl CampaignStep {
    /// Returns the name of the step's log file.
    pub(super) fn file_name(&self) -> String {
        self.id.replace(['/', ':', ' '], "-")
    }

    /// Returns a step that runs one test with the seed `seed`.
    fn for_test(
        part: &'static str,
        test: &Test,
        seed: u64,
        skips: &mut SkipDecider,
    ) -> CampaignStep {
        let skip = test.ignored.then(|| skips.reason(&test.binary, &test.name));
        CampaignStep {
            id: format!("{part}/{}/{}/{seed}", test.binary, test.name),
            part,
            program: test.path.clone(),
            words: words(&["--exact", &test.name, "--include-ignored", "--nocapture"]),
            folder: test.folder.clone(),
            env: vec![("SEMPA_TEST_SEED", seed.to_string())],
            skip: skip.flatten(),
        }
    }

    /// Returns a step that runs a cargo command in the project.
    fn cargo(part: &'static str, name: &str, line: &[&str]) -> CampaignStep {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        CampaignStep {
            id: format!("{part}/{name}"),
            part,
            program: cargo.into(),
            words: words(line),
            folder: setup::project_folder(),
            env: Vec::new(),
            skip: None,
        }
    }
}

fn words(line: &[&str]) -> Vec<String> {
    line.iter().map(|word| word.to_string()).collect()
}

/// Returns all steps, in the order of the parts.
pub(super) fn all_steps(
    tests: &[Test],
    seed: u64,
    skips: &mut SkipDecider,
    profile: &str,
) -> Vec<CampaignStep> {
    let mut steps = Vec::new();
    for part in PARTS {
        match part {
            "models" => steps.push(model_checker_step(profile)),
            "fuzz" => steps.extend(fuzz_steps(tests, seed, skips)),
            "properties" => steps.extend(property_steps(tests, seed, skips)),
            "release" => steps.push(release_step()),
            _ => steps.extend(binary_steps(part, tests, seed, skips)),
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
            let mut soak = CampaignStep::cargo(part, "bench soak", &line);
            soak.skip = skips.reason("sempa-tests::soak", "");
            steps.push(soak);
        }
    }
    steps
}

/// Returns the step that checks rings and doorbells with the model checker: two threads in all
/// interleavings, up to a number of preemptions.
fn model_checker_step(profile: &str) -> CampaignStep {
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
    CampaignStep::cargo("models", "rings and bells", &line)
}

/// Returns [`FUZZ_STEPS`] steps that pass random inputs to all parsers. Each step has its own seed.
fn fuzz_steps(tests: &[Test], seed: u64, skips: &mut SkipDecider) -> Vec<CampaignStep> {
    let inputs = tests
        .iter()
        .filter(|test| test.binary == "sempa-fuzz::inputs");
    let mut steps = Vec::new();
    for test in inputs {
        for number in 0..FUZZ_STEPS {
            let own = seed.wrapping_mul(FUZZ_STEPS).wrapping_add(number).max(1);
            let mut step = CampaignStep::for_test("fuzz", test, own, skips);
            step.env
                .push(("SEMPA_FUZZ_INPUTS", FUZZ_INPUTS.to_string()));
            step.env.push(("SEMPA_FUZZ_SEED", own.to_string()));
            steps.push(step);
        }
    }
    steps
}

/// Returns steps that run the tests of [`PROPERTY_PACKAGES`] with more cases and with several
/// seeds.
fn property_steps(tests: &[Test], seed: u64, skips: &mut SkipDecider) -> Vec<CampaignStep> {
    let is_one = |test: &&Test| {
        let package = test.binary.split("::").next().unwrap_or_default();
        PROPERTY_PACKAGES.contains(&package) && !test.ignored
    };
    let mut binaries: Vec<&Test> = tests.iter().filter(is_one).collect();
    binaries.sort_by(|a, b| a.binary.cmp(&b.binary));
    binaries.dedup_by(|a, b| a.binary == b.binary);
    let mut steps = Vec::new();
    for test in binaries {
        for number in 0..SEEDS_PER_TEST {
            let own = seed.wrapping_add(number);
            let mut step = CampaignStep::for_test("properties", test, own, skips);
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

/// Returns the steps for the tests of all binaries of a part.
fn binary_steps(
    part: &'static str,
    tests: &[Test],
    seed: u64,
    skips: &mut SkipDecider,
) -> Vec<CampaignStep> {
    let binaries = BINARIES
        .iter()
        .find(|(of, _)| *of == part)
        .map_or(&[][..], |(_, binaries)| binaries);
    let seeds = if part == "lies" { SEEDS_PER_TEST } else { 1 };
    let mut steps = Vec::new();
    for test in tests
        .iter()
        .filter(|test| binaries.contains(&&*test.binary))
    {
        for number in 0..seeds {
            steps.push(CampaignStep::for_test(
                part,
                test,
                seed.wrapping_add(number),
                skips,
            ));
        }
    }
    steps
}

/// Returns the step that runs the tests of both tiers with the release build, which users install.
fn release_step() -> CampaignStep {
    let line = ["run", "--locked", "--release", "-p", "xtask", "--", "test"];
    let mut step = CampaignStep::cargo("release", "test", &line);
    step.env.push(("SEMPA_TEST_FULL", String::new()));
    step
}
