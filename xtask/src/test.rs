//! `cargo xtask test`: checks the sources, sets up the machine, builds once, installs the programs,
//! and runs the tests of both tiers.
//!
//! Format and language are checked first, because that takes seconds. The model checker is built
//! before the long run, so that an error in its code appears early. Clippy, rustdoc and cargo-deny
//! follow the tests. A failed check does not stop the run, but the run counts as failed.

use crate::install::{self, BuildParts};
use crate::runner::{self, Test, TestCounts, TestSelection};
use crate::setup;
use crate::skips::SkipDecider;
use crate::tidy;
use anyhow::Result;
use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::time::{Instant, SystemTime};

/// Environment variable and value that set the seed of proptest. The seed is fixed, so that a new
/// failure is caused by a change.
const PROPTEST_SEED: (&str, &str) = ("PROPTEST_RNG_SEED", "20261122");

/// Environment variable with the seed that selects faults, victims and steps.
pub(crate) const SEED_ENV: &str = "SEMPA_TEST_SEED";

/// Environment variable and value that set the number of random inputs for all parsers of packed
/// data.
const FUZZ_INPUTS: (&str, &str) = ("SEMPA_FUZZ_INPUTS", "10000000");

/// The model checker: rings and doorbells with two threads in all interleavings.
const MODEL_CHECKER: TestSelection = TestSelection {
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

/// Runs all tests. `words` are passed to the test runner and restrict the tests; if there are any,
/// the sources are not checked. Returns false if a test or a check fails.
///
/// # Errors
/// The set-up or the build fails.
pub(crate) fn run(words: &[String]) -> Result<bool> {
    let start = Instant::now();
    let profile = install::own_profile()?;
    let seed = seed();
    println!("test: profile {profile}, {SEED_ENV}={seed}");
    let mut failed_checks = Vec::new();
    if words.is_empty() {
        failed_checks.extend(check_sources()?);
    }
    let env = prepare(&profile)?;
    let mut skips = SkipDecider::new(env.no_criu, false);
    println!(
        "test: set-up and build took {} s",
        start.elapsed().as_secs()
    );
    let begun = Instant::now();
    let variables = test_variables(&env.prefix, seed);
    let whole = TestSelection {
        packages: &["--workspace"],
        env: &variables,
    };
    let runner = runner::runner(&profile);
    let skipped = skipped_tests(&runner.list(whole)?, &mut skips);
    if words.is_empty() {
        // Listing builds the tests.
        runner.list(MODEL_CHECKER)?;
    }
    let mut counts = runner.run(whole, &skipped, words)?;
    if words.is_empty() {
        counts += runner.run(MODEL_CHECKER, &[], &[])?;
        counts += run_doc_tests(&profile)?;
        failed_checks.extend(check_code(&profile)?);
    }
    let good = counts.failed == 0 && failed_checks.is_empty();
    println!(
        "test: {}: {} passed, {} failed{}, {} skipped in {} s after {} s of set-up and build; \
         {SEED_ENV}={seed}",
        if good { "all passed" } else { "NOT ALL PASSED" },
        counts.passed,
        counts.failed + failed_checks.len(),
        describe_failed_checks(&failed_checks),
        skipped.len(),
        begun.elapsed().as_secs(),
        (begun - start).as_secs(),
    );
    Ok(good)
}

/// The result of the set-up for tests of the system tier.
pub(crate) struct TestSetup {
    /// Folder in which the programs are installed.
    pub(crate) prefix: String,
    /// The reason why CRIU does not work; `None` if it works.
    pub(crate) no_criu: Option<String>,
}

/// Installs packages, builds the workspace and installs its programs below the target folder.
///
/// # Errors
/// A package cannot be installed, or the build fails.
pub(crate) fn prepare(profile: &str) -> Result<TestSetup> {
    setup::ensure_packages(&setup::PACKAGES)?;
    let no_criu = setup::ensure_criu().err().map(|error| format!("{error:#}"));
    install::build(profile, BuildParts::Tests)?;
    let prefix = install::target_folder()?.join("sempa-prefix");
    install::install_files(&prefix, profile)?;
    Ok(TestSetup {
        prefix: prefix.display().to_string(),
        no_criu,
    })
}

/// Returns the seed of this run: the value of [`SEED_ENV`], or the number of the day.
pub(crate) fn seed() -> u64 {
    let given = std::env::var(SEED_ENV)
        .ok()
        .and_then(|text| text.parse().ok());
    given.unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        now.map_or(0, |time| time.as_secs() / (24 * 60 * 60))
    })
}

/// Returns the environment variables for all tests. A variable that the caller has set keeps its
/// value.
pub(crate) fn test_variables(prefix: &str, seed: u64) -> Vec<(&'static str, String)> {
    let usual = [PROPTEST_SEED, FUZZ_INPUTS];
    let unset = |(name, _): &(&'static str, &str)| std::env::var_os(name).is_none();
    let mut all: Vec<(&'static str, String)> = usual
        .into_iter()
        .filter(unset)
        .map(|(name, value)| (name, value.to_string()))
        .collect();
    all.push(("SEMPA_PREFIX", prefix.to_string()));
    all.push((SEED_ENV, seed.to_string()));
    all
}

/// Returns the tests of the system tier that this machine cannot run. Prints their number for each
/// binary and reason.
pub(crate) fn skipped_tests(tests: &[Test], skips: &mut SkipDecider) -> Vec<Test> {
    let mut reasons: BTreeMap<(&str, String), usize> = BTreeMap::new();
    let mut skipped = Vec::new();
    for test in tests.iter().filter(|test| test.ignored) {
        if let Some(reason) = skips.reason(&test.binary, &test.name) {
            *reasons.entry((&test.binary, reason)).or_default() += 1;
            skipped.push(test.clone());
        }
    }
    for ((binary, reason), count) in reasons {
        println!("skipped: {count} tests of {binary}: {reason}");
    }
    skipped
}

/// Tests the examples in the documentation, which nextest does not run.
fn run_doc_tests(profile: &str) -> Result<TestCounts> {
    let words = ["test", "--locked", "--doc", "--workspace"];
    let done = install::cargo(&words)?
        .args(["--profile", profile])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()?;
    let text = String::from_utf8_lossy(&done.stdout);
    let mut counts = runner::sum_results(&text);
    if !done.status.success() {
        print!("{text}");
        counts.failed = counts.failed.max(1);
    }
    Ok(counts)
}

/// True if a component of the toolchain is installed.
fn has_component(component: &str) -> bool {
    Command::new("cargo")
        .args([component, "--version"])
        .output()
        .is_ok_and(|done| done.status.success())
}

/// Checks the sources without a build. Returns the names of the failed checks.
///
/// # Errors
/// A source file cannot be read.
fn check_sources() -> Result<Vec<&'static str>> {
    let mut failed = Vec::new();
    if !check_format() {
        failed.push("format");
    }
    if !tidy::run()? {
        failed.push("tidy");
    }
    Ok(failed)
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
    let mut failed = Vec::new();
    if !has_component("clippy") {
        println!("test: clippy is not installed: the lints are not checked");
    } else if !check_lints(profile)? {
        failed.push("clippy");
    }
    if !check_documentation(profile)? {
        failed.push("rustdoc");
    }
    if !has_component("deny") {
        println!(
            "test: cargo-deny is not installed: the dependencies are not checked; \
             install it with cargo install --locked cargo-deny"
        );
    } else if !check_dependencies()? {
        failed.push("deny");
    }
    Ok(failed)
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

/// Checks the format of the sources. Returns true if it is correct, or if rustfmt is not installed.
fn check_format() -> bool {
    if !has_component("fmt") {
        println!("test: rustfmt is not installed: the format is not checked");
        return true;
    }
    let checked = install::cargo(&["fmt", "--all", "--check"])
        .and_then(|mut command| Ok(command.stdin(Stdio::null()).status()?));
    let good = checked.is_ok_and(|status| status.success());
    if !good {
        println!("test: THE FORMAT IS WRONG: run cargo fmt --all");
    }
    good
}

/// Checks the workspace with clippy. Returns true if there are no findings.
fn check_lints(profile: &str) -> Result<bool> {
    let words = [
        "clippy",
        "--locked",
        "--workspace",
        "--all-targets",
        "--quiet",
    ];
    let mut command = install::cargo(&words)?;
    command.args(["--profile", profile, "--", "--deny", "warnings"]);
    run_check("clippy", command)
}

/// Builds the documentation of all items, including private ones. Returns true if rustdoc has no
/// warnings.
fn check_documentation(profile: &str) -> Result<bool> {
    let words = [
        "doc",
        "--locked",
        "--workspace",
        "--no-deps",
        "--document-private-items",
        "--quiet",
    ];
    let mut command = install::cargo(&words)?;
    command
        .args(["--profile", profile])
        .env("RUSTDOCFLAGS", "--deny warnings");
    run_check("rustdoc", command)
}

/// Checks licences, sources and known faults of the dependencies (`deny.toml`). Returns true if
/// there are no errors.
fn check_dependencies() -> Result<bool> {
    run_check(
        "cargo-deny",
        install::cargo(&["deny", "--locked", "check"])?,
    )
}

/// Runs a check and prints its outcome with its duration. Returns true if it succeeds.
fn run_check(name: &str, mut command: Command) -> Result<bool> {
    let begun = Instant::now();
    let good = command.stdin(Stdio::null()).status()?.success();
    println!(
        "test: {name} {} in {} s",
        if good { "found nothing" } else { "COMPLAINS" },
        begun.elapsed().as_secs()
    );
    Ok(good)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The last line of a run names each failed check.
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
