//! Lists the steps of a campaign, part by part.

use crate::runner::Test;
use crate::skips::SkipDecider;
use std::path::PathBuf;

/// The parts of a campaign in the order in which they run. The parts that find the most faults in
/// the least time are the first ones.
pub(super) const CAMPAIGN_PARTS: [&str; 10] = [
    "models",
    "fuzz",
    "properties",
    "lies",
    "conformance",
    "limits",
    "matrices",
    "soak",
    "packages",
    "release",
];

/// Number of steps of the fuzzer.
const FUZZ_STEP_COUNT: u64 = 10;
/// Number of random inputs of each fuzzer step. All steps together pass 10^8 inputs.
const INPUTS_PER_FUZZ_STEP: &str = "10000000";
/// Number of cases for each property; proptest's default is 256.
const CASES_PER_PROPERTY: &str = "4096";
/// Number of seeds for each test of the parts `lies` and `properties`.
const SEEDS_PER_TEST: u64 = 3;

/// The test binaries of the campaign parts that run complete binaries, as (part, binaries). Many
/// tests in these binaries try more cases if `SEMPA_TEST_FULL` is set.
const PART_BINARIES: [(&str, &[&str]); 5] = [
    (
        "lies",
        &[
            "sempa-tests::checkpoint_engine_faults",
            "sempa-tests::migration_engine_faults",
        ],
    ),
    ("conformance", &["sempa-tests::conformance"]),
    ("limits", &["sempa-tests::limits", "sempa-tests::lost_work"]),
    (
        "matrices",
        &[
            "sempa-tests::migration_faults",
            "sempa-tests::checkpoint_faults",
            "sempa-tests::post_copy",
            "sempa-tests::routes",
            "sempa-tests::all_to_all",
            "pvm-tasker::engine_failures",
        ],
    ),
    ("soak", &["sempa-tests::soak"]),
];

/// Packages that contain property tests with proptest.
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
    pub(super) arguments: Vec<String>,
    pub(super) folder: PathBuf,
    pub(super) env: Vec<(&'static str, String)>,
    /// The reason to skip the step, namely what the machine lacks for the step; `None` if the step
    /// can run.
    pub(super) skip_reason: Option<String>,
}

impl CampaignStep {
    /// Returns the name of the step's log file.
    pub(super) fn log_file_name(&self) -> String {
        self.id.replace(['/', ':', ' '], "-")
    }

    /// Returns a step that runs one test with the seed `test_seed`.
    fn for_test(
        part: &'static str,
        test: &Test,
        test_seed: u64,
        skip_decider: &mut SkipDecider,
    ) -> Self {
        let found_reason = test
            .is_ignored
            .then(|| skip_decider.skip_reason(&test.binary, &test.name));
        Self {
            id: format!("{part}/{}/{}/{test_seed}", test.binary, test.name),
            part,
            program: test.binary_path.clone(),
            arguments: to_strings(&["--exact", &test.name, "--include-ignored", "--nocapture"]),
            folder: test.package_folder.clone(),
            env: vec![("SEMPA_TEST_SEED", test_seed.to_string())],
            skip_reason: found_reason.flatten(),
        }
    }

    /// Returns a step that runs a cargo command in the project.
    fn for_cargo(part: &'static str, name: &str, arguments: &[&str]) -> Self {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        Self {
            id: format!("{part}/{name}"),
            part,
            program: cargo.into(),
            arguments: to_strings(arguments),
            folder: xtask_install::project_folder(),
            env: Vec::new(),
            skip_reason: None,
        }
    }
}

fn to_strings(arguments: &[&str]) -> Vec<String> {
    arguments.iter().map(|text| text.to_string()).collect()
}

/// Returns all steps, in the order of the parts.
pub(super) fn all_steps(
    tests: &[Test],
    seed: u64,
    skip_decider: &mut SkipDecider,
    profile: &str,
) -> Vec<CampaignStep> {
    let mut steps = Vec::new();
    for part in CAMPAIGN_PARTS {
        match part {
            "models" => steps.push(model_checker_step(profile)),
            "fuzz" => steps.extend(fuzz_steps(tests, seed, skip_decider)),
            "properties" => steps.extend(property_steps(tests, seed, skip_decider)),
            "packages" => steps.push(package_step()),
            "release" => steps.push(release_step()),
            _ => steps.extend(binary_steps(part, tests, seed, skip_decider)),
        }
        if part == "soak" {
            let arguments = [
                "run",
                "--locked",
                "--release",
                "-p",
                "xtask",
                "--",
                "bench",
                "soak",
            ];
            let mut soak_step = CampaignStep::for_cargo(part, "bench soak", &arguments);
            soak_step.skip_reason = skip_decider.skip_reason("sempa-tests::soak", "");
            steps.push(soak_step);
        }
    }
    steps
}

/// Returns the step in which the model checker tests rings and doorbells: two threads in all
/// interleavings, up to a number of preemptions.
fn model_checker_step(profile: &str) -> CampaignStep {
    let arguments = [
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
    CampaignStep::for_cargo("models", "rings and bells", &arguments)
}

/// Returns [`FUZZ_STEP_COUNT`] steps that pass random inputs to all parsers. Each step has a
/// different seed.
fn fuzz_steps(tests: &[Test], seed: u64, skip_decider: &mut SkipDecider) -> Vec<CampaignStep> {
    let input_tests = tests
        .iter()
        .filter(|test| test.binary == "sempa-fuzz::inputs");
    let mut steps = Vec::new();
    for test in input_tests {
        for seed_offset in 0..FUZZ_STEP_COUNT {
            let step_seed = seed
                .wrapping_mul(FUZZ_STEP_COUNT)
                .wrapping_add(seed_offset)
                .max(1);
            let mut step = CampaignStep::for_test("fuzz", test, step_seed, skip_decider);
            step.env
                .push(("SEMPA_FUZZ_INPUTS", INPUTS_PER_FUZZ_STEP.to_string()));
            step.env.push(("SEMPA_FUZZ_SEED", step_seed.to_string()));
            steps.push(step);
        }
    }
    steps
}

/// Returns steps that run the tests of [`PROPERTY_PACKAGES`] with more cases and with several
/// seeds.
fn property_steps(tests: &[Test], seed: u64, skip_decider: &mut SkipDecider) -> Vec<CampaignStep> {
    let has_properties = |test: &&Test| {
        let package = test.binary.split("::").next().unwrap_or_default();
        PROPERTY_PACKAGES.contains(&package) && !test.is_ignored
    };
    let mut binary_tests: Vec<&Test> = tests.iter().filter(has_properties).collect();
    binary_tests.sort_by(|a, b| a.binary.cmp(&b.binary));
    binary_tests.dedup_by(|a, b| a.binary == b.binary);
    let mut steps = Vec::new();
    for test in binary_tests {
        for seed_offset in 0..SEEDS_PER_TEST {
            let step_seed = seed.wrapping_add(seed_offset);
            let mut step = CampaignStep::for_test("properties", test, step_seed, skip_decider);
            step.id = format!("properties/{}/{step_seed}", test.binary);
            step.arguments = to_strings(&["--test-threads", "2"]);
            step.env.push(("PROPTEST_RNG_SEED", step_seed.to_string()));
            step.env
                .push(("PROPTEST_CASES", CASES_PER_PROPERTY.to_string()));
            steps.push(step);
        }
    }
    steps
}

/// Returns the steps that run the tests of all binaries of `part`.
fn binary_steps(
    part: &'static str,
    tests: &[Test],
    seed: u64,
    skip_decider: &mut SkipDecider,
) -> Vec<CampaignStep> {
    let binaries = PART_BINARIES
        .iter()
        .find(|(table_part, _)| *table_part == part)
        .map_or(&[][..], |(_, binaries)| binaries);
    let seed_count = if part == "lies" { SEEDS_PER_TEST } else { 1 };
    let mut steps = Vec::new();
    for test in tests
        .iter()
        .filter(|test| binaries.contains(&&*test.binary))
    {
        for seed_offset in 0..seed_count {
            steps.push(CampaignStep::for_test(
                part,
                test,
                seed.wrapping_add(seed_offset),
                skip_decider,
            ));
        }
    }
    steps
}

/// Returns the step that makes the packages of a release and checks them in fresh systems.
fn package_step() -> CampaignStep {
    CampaignStep::for_cargo("packages", "check", &["xtask", "package", "--check"])
}

/// Returns the step that runs the tests of both tiers with the release build, because users install
/// this build.
fn release_step() -> CampaignStep {
    let arguments = ["run", "--locked", "--release", "-p", "xtask", "--", "test"];
    let mut step = CampaignStep::for_cargo("release", "test", &arguments);
    step.env.push(("SEMPA_TEST_FULL", String::new()));
    step
}
