//! `cargo xtask test`: checks the sources, sets up the machine, builds once, installs the programs,
//! and runs the tests of both tiers.
//!
//! Format and language are checked first, because these checks take only seconds. The model checker
//! is built before the long run, so that an error in its code appears early. Clippy, rustdoc and
//! cargo-deny follow the tests. A failed check does not stop the run, but the run counts as failed.

use crate::runner::{self, Test, TestCounts, TestSelection};
use crate::setup;
use crate::skips::{SetupFailures, SkipDecider};
use crate::tidy;
use anyhow::Result;
use sempa_tests::source_packages::FASTDNAML;
use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::time::{Instant, SystemTime};
use xtask_install::{self as install, BuildParts};

/// Environment variable and value that set the seed of proptest. With a fixed seed, only a change
/// of the code can cause a new failure.
const PROPTEST_SEED_VARIABLE: (&str, &str) = ("PROPTEST_RNG_SEED", "20261122");

/// Environment variable with the seed that determines which faults, victims and steps the tests
/// select.
pub(crate) const TEST_SEED_VARIABLE: &str = "SEMPA_TEST_SEED";

/// Environment variable and value that set the number of random inputs for all parsers of packed
/// data.
const FUZZ_INPUTS_VARIABLE: (&str, &str) = ("SEMPA_FUZZ_INPUTS", "10000000");

/// The test of the model checker: rings and doorbells with two threads in all interleavings.
const MODEL_CHECKER_TESTS: TestSelection = TestSelection {
    packages: &[
        "--package",
        "sempa-ring",
        "--features",
        "loom",
        "--test",
        "model",
    ],
    env: &[],
};

/// Names of the tests that need `libpvm3` as users install it.
const C_LIBRARY_TESTS: [&str; 4] = [
    "installed_library_executes_few_instructions",
    "installed_library_executes_few_locked_operations",
    "installed_library_skips_unreceived_messages_at_no_cost",
    "installed_library_is_complete",
];

/// Runs all tests. `runner_arguments` are passed to the test runner and restrict the tests; if
/// `runner_arguments` is not empty, the sources are not checked. Returns false if a test or a check
/// fails.
///
/// # Errors
/// The set-up or the build fails.
pub(crate) fn run(runner_arguments: &[String]) -> Result<bool> {
    let start = Instant::now();
    let profile = install::build_profile()?;
    let seed = run_seed();
    println!("test: profile {profile}, {TEST_SEED_VARIABLE}={seed}");
    let mut failed_checks = Vec::new();
    if runner_arguments.is_empty() {
        failed_checks.extend(check_sources()?);
    }
    let test_setup = set_up_and_install(&profile)?;
    if needs_c_library(runner_arguments) {
        install::build_c_library()?;
    }
    let mut skip_decider = SkipDecider::new(test_setup.failures, false);
    println!(
        "test: set-up and build took {} s",
        start.elapsed().as_secs()
    );
    let test_start = Instant::now();
    let variables = test_variables(&test_setup.prefix, seed);
    let workspace_selection = TestSelection {
        packages: &["--workspace"],
        env: &variables,
    };
    let runner = runner::select_runner(&profile);
    let tests_to_skip = skipped_tests(
        &runner.build_and_list(workspace_selection)?,
        &mut skip_decider,
    );
    if runner_arguments.is_empty() {
        // Listing the tests of the model checker also builds these tests.
        runner.build_and_list(MODEL_CHECKER_TESTS)?;
    }
    let mut counts = runner.run_tests(workspace_selection, &tests_to_skip, runner_arguments)?;
    if runner_arguments.is_empty() {
        counts += runner.run_tests(MODEL_CHECKER_TESTS, &[], &[])?;
        counts += run_doc_tests(&profile)?;
        failed_checks.extend(check_code(&profile)?);
    }
    let succeeded = counts.failed == 0 && failed_checks.is_empty();
    println!(
        "test: {}: {} passed{}, {} failed{}, {} skipped in {} s after {} s of set-up and build; \
         {TEST_SEED_VARIABLE}={seed}",
        if succeeded {
            "all passed"
        } else {
            "NOT ALL PASSED"
        },
        counts.passed,
        describe_flaky_tests(counts.flaky),
        counts.failed + failed_checks.len(),
        describe_failed_checks(&failed_checks),
        tests_to_skip.len(),
        test_start.elapsed().as_secs(),
        (test_start - start).as_secs(),
    );
    Ok(succeeded)
}

/// True if a run with these arguments includes the tests of [`C_LIBRARY_TESTS`], which count the
/// instructions of the installed `libpvm3`. Its build takes a minute.
fn needs_c_library(runner_arguments: &[String]) -> bool {
    runner_arguments.is_empty()
        || runner_arguments
            .iter()
            .any(|argument| C_LIBRARY_TESTS.iter().any(|name| name.contains(argument)))
}

/// The result of the set-up for tests of the system tier.
pub(crate) struct TestSetup {
    /// Folder in which the programs are installed.
    pub(crate) prefix: String,
    pub(crate) failures: SetupFailures,
}

/// Installs packages and CRIU, fetches source packages, builds the workspace and installs its
/// programs below the target folder. A failure to install CRIU or to fetch a source package becomes
/// part of the result.
///
/// # Errors
/// A package cannot be installed, or the build fails.
pub(crate) fn set_up_and_install(profile: &str) -> Result<TestSetup> {
    setup::ensure_packages(&setup::REQUIRED_PACKAGES)?;
    let reason = |result: Result<()>| result.err().map(|error| format!("{error:#}"));
    let failures = SetupFailures {
        criu: reason(setup::ensure_criu()),
        source_packages: reason(FASTDNAML.ensure_fetched()),
    };
    install::build(profile, BuildParts::Tests)?;
    let prefix = install::target_folder()?.join("sempa-prefix");
    install::install_files(&prefix, profile)?;
    Ok(TestSetup {
        prefix: prefix.display().to_string(),
        failures,
    })
}

/// Returns the seed of this run: the value of [`TEST_SEED_VARIABLE`], or the number of days since
/// 1970.
pub(crate) fn run_seed() -> u64 {
    let configured_seed = std::env::var(TEST_SEED_VARIABLE)
        .ok()
        .and_then(|text| text.parse().ok());
    configured_seed.unwrap_or_else(|| {
        let elapsed = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        elapsed.map_or(0, |time| time.as_secs() / (24 * 60 * 60))
    })
}

/// Returns the environment variables for all tests. The seed of proptest and the number of fuzz
/// inputs are omitted if the environment of this program contains them.
pub(crate) fn test_variables(prefix: &str, seed: u64) -> Vec<(&'static str, String)> {
    let default_variables = [PROPTEST_SEED_VARIABLE, FUZZ_INPUTS_VARIABLE];
    let is_unset = |(name, _): &(&'static str, &str)| std::env::var_os(name).is_none();
    let mut variables: Vec<(&'static str, String)> = default_variables
        .into_iter()
        .filter(is_unset)
        .map(|(name, value)| (name, value.to_string()))
        .collect();
    variables.push(("SEMPA_PREFIX", prefix.to_string()));
    variables.push((TEST_SEED_VARIABLE, seed.to_string()));
    variables
}

/// Returns the tests of the system tier that this machine cannot run. Prints the number of these
/// tests for each binary and reason.
pub(crate) fn skipped_tests(tests: &[Test], skip_decider: &mut SkipDecider) -> Vec<Test> {
    let mut counts_by_reason: BTreeMap<(&str, String), usize> = BTreeMap::new();
    let mut skipped_tests = Vec::new();
    for test in tests.iter().filter(|test| test.is_ignored) {
        if let Some(reason) = skip_decider.skip_reason(&test.binary, &test.name) {
            *counts_by_reason.entry((&test.binary, reason)).or_default() += 1;
            skipped_tests.push(test.clone());
        }
    }
    for ((binary, reason), test_count) in counts_by_reason {
        println!("skipped: {test_count} tests of {binary}: {reason}");
    }
    skipped_tests
}

/// Tests the examples in the documentation, because nextest does not run them.
fn run_doc_tests(profile: &str) -> Result<TestCounts> {
    let arguments = ["test", "--locked", "--doc", "--workspace"];
    let cargo_output = install::cargo_command(&arguments)?
        .args(["--profile", profile])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()?;
    let cargo_stdout = String::from_utf8_lossy(&cargo_output.stdout);
    let mut counts = runner::sum_results(&cargo_stdout);
    if !cargo_output.status.success() {
        print!("{cargo_stdout}");
        counts.failed = counts.failed.max(1);
    }
    Ok(counts)
}

/// True if the subcommand `component` of cargo is installed.
fn has_component(component: &str) -> bool {
    Command::new("cargo")
        .args([component, "--version"])
        .output()
        .is_ok_and(|cargo_output| cargo_output.status.success())
}

/// Checks the sources without a build. Returns the names of the failed checks.
///
/// # Errors
/// A source file cannot be read.
fn check_sources() -> Result<Vec<&'static str>> {
    let mut failed_checks = Vec::new();
    if !check_format() {
        failed_checks.push("format");
    }
    if !tidy::run_checks()? {
        failed_checks.push("tidy");
    }
    Ok(failed_checks)
}

/// Checks the code with clippy, its documentation with rustdoc, and its dependencies with
/// cargo-deny. Returns the names of the failed checks.
///
/// Clippy and rustdoc use the profile of the tests' build, so that build scripts and procedural
/// macros are not compiled again.
///
/// # Errors
/// Cargo cannot be started.
fn check_code(profile: &str) -> Result<Vec<&'static str>> {
    let mut failed_checks = Vec::new();
    if !has_component("clippy") {
        println!("test: clippy is not installed: the lints are not checked");
    } else if !check_lints(profile)? {
        failed_checks.push("clippy");
    }
    if !check_documentation(profile)? {
        failed_checks.push("rustdoc");
    }
    if !has_component("deny") {
        println!(
            "test: cargo-deny is not installed: the dependencies are not checked; \
             install it with cargo install --locked cargo-deny"
        );
    } else if !check_dependencies()? {
        failed_checks.push("deny");
    }
    Ok(failed_checks)
}

/// Returns the number of tests that passed only at the second attempt, in parentheses, for the last
/// line of the run; empty if there is none. The runner's summary names these tests.
fn describe_flaky_tests(count: usize) -> String {
    match count {
        0 => String::new(),
        count => format!(" ({count} only at the second attempt: FLAKY above)"),
    }
}

/// Returns the names of the failed checks in parentheses, for the last line of the run; empty if no
/// check has failed.
fn describe_failed_checks(names: &[&str]) -> String {
    match names {
        [] => String::new(),
        [name] => format!(" (among them the check {name})"),
        names => format!(" (among them the checks {})", names.join(", ")),
    }
}

/// Checks the format of the sources. Returns true if the format is correct, or if rustfmt is not
/// installed.
fn check_format() -> bool {
    if !has_component("fmt") {
        println!("test: rustfmt is not installed: the format is not checked");
        return true;
    }
    let fmt_status = install::cargo_command(&["fmt", "--all", "--check"])
        .and_then(|mut command| Ok(command.stdin(Stdio::null()).status()?));
    let is_formatted = fmt_status.is_ok_and(|status| status.success());
    if !is_formatted {
        println!("test: THE FORMAT IS WRONG: run cargo fmt --all");
    }
    is_formatted
}

/// Checks the workspace with clippy. Returns true if there are no findings.
fn check_lints(profile: &str) -> Result<bool> {
    let arguments = [
        "clippy",
        "--locked",
        "--workspace",
        "--all-targets",
        "--quiet",
    ];
    let mut command = install::cargo_command(&arguments)?;
    command.args(["--profile", profile, "--", "--deny", "warnings"]);
    run_check("clippy", command)
}

/// Builds the documentation of all items, including private ones. Returns true if rustdoc has no
/// warnings.
fn check_documentation(profile: &str) -> Result<bool> {
    let arguments = [
        "doc",
        "--locked",
        "--workspace",
        "--no-deps",
        "--document-private-items",
        "--quiet",
    ];
    let mut command = install::cargo_command(&arguments)?;
    command
        .args(["--profile", profile])
        .env("RUSTDOCFLAGS", "--deny warnings");
    run_check("rustdoc", command)
}

/// Checks licences, sources and known faults of the dependencies (`deny.toml`). Returns true if
/// cargo-deny reports no errors.
fn check_dependencies() -> Result<bool> {
    run_check(
        "cargo-deny",
        install::cargo_command(&["deny", "--locked", "check"])?,
    )
}

/// Runs a check; prints whether the check has succeeded, and its duration. Returns true if the
/// check has succeeded.
fn run_check(name: &str, mut command: Command) -> Result<bool> {
    let start = Instant::now();
    let succeeded = command.stdin(Stdio::null()).status()?.success();
    println!(
        "test: {name} {} in {} s",
        if succeeded {
            "found nothing"
        } else {
            "COMPLAINS"
        },
        start.elapsed().as_secs()
    );
    Ok(succeeded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_named_runs_omit_the_installed_library() {
        let arguments =
            |text: &str| -> Vec<String> { text.split_whitespace().map(str::to_string).collect() };
        assert!(needs_c_library(&arguments("")));
        assert!(needs_c_library(&arguments("drain few_instructions")));
        assert!(!needs_c_library(&arguments("drain")));
    }

    #[test]
    fn failed_checks_are_named() {
        assert_eq!(describe_failed_checks(&[]), "");
        assert_eq!(
            describe_failed_checks(&["tidy"]),
            " (among them the check tidy)"
        );
        assert_eq!(
            describe_failed_checks(&["tidy", "deny"]),
            " (among them the checks tidy, deny)"
        );
    }
}
