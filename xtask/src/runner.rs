//! Lists and runs the tests of the workspace. Uses nextest if it is installed; otherwise runs the
//! test binaries directly.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use xtask_install as install;

/// A test function, as its test binary lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Test {
    /// Name of the test binary in nextest's form, such as `sempa-tests::drain`.
    pub(crate) binary: String,
    /// Name of the test within the binary.
    pub(crate) name: String,
    /// True if the test has the attribute `#[ignore]`, so that it belongs to the system tier.
    pub(crate) is_ignored: bool,
    /// Path of the test binary.
    pub(crate) binary_path: PathBuf,
    /// Folder of the test's package. Tests run in this folder.
    pub(crate) package_folder: PathBuf,
}

/// Number of tests of a run, by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TestCounts {
    /// Number of passed tests, including the flaky ones.
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    /// Number of tests that failed first and passed at the second attempt.
    pub(crate) flaky: usize,
}

impl std::ops::AddAssign for TestCounts {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.flaky += other.flaky;
    }
}

/// The packages, features and environment variables of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TestSelection<'a> {
    /// Arguments of cargo: `--workspace`, or packages with their features.
    pub(crate) packages: &'a [&'a str],
    /// Environment variables of the tests.
    pub(crate) env: &'a [(&'a str, String)],
}

/// True if `cargo nextest` is installed.
pub(crate) fn has_nextest() -> bool {
    Command::new("cargo")
        .args(["nextest", "--version"])
        .output()
        .is_ok_and(|version_output| version_output.status.success())
}

/// Lists and runs the tests, with or without nextest.
pub(crate) trait TestRunner {
    /// Builds the selected tests and returns a list of them. Functions that are not tests
    /// ([`is_test`]) are omitted.
    fn build_and_list(&self, selection: TestSelection) -> Result<Vec<Test>>;
    /// Runs all tests of both tiers except the tests in `skipped_tests`. `name_arguments` are
    /// arguments that restrict the tests. Returns the number of passed and failed tests.
    fn run_tests(
        &self,
        selection: TestSelection,
        skipped_tests: &[Test],
        name_arguments: &[String],
    ) -> Result<TestCounts>;
}

/// Returns the runner for this machine: [`Nextest`] if nextest is installed, otherwise [`Libtest`].
pub(crate) fn select_runner(profile: &str) -> Box<dyn TestRunner> {
    let profile = profile.to_string();
    if has_nextest() {
        Box::new(Nextest { profile })
    } else {
        Box::new(Libtest { profile })
    }
}

/// Runs each test in its own process, several at the same time (`.config/nextest.toml`).
struct Nextest {
    profile: String,
}

impl Nextest {
    fn nextest_command(&self, subcommand: &str, selection: TestSelection) -> Result<Command> {
        let mut command =
            install::cargo_command(&["nextest", subcommand, "--locked", "--cargo-profile"])?;
        command
            .arg(&self.profile)
            .args(selection.packages)
            .args(["--run-ignored", "all"])
            .stdin(Stdio::null());
        command.envs(selection.env.iter().map(|(name, value)| (name, value)));
        Ok(command)
    }
}

impl TestRunner for Nextest {
    fn build_and_list(&self, selection: TestSelection) -> Result<Vec<Test>> {
        let mut command = self.nextest_command("list", selection)?;
        let cargo_output = command
            .args(["--message-format", "json"])
            .stderr(Stdio::inherit())
            .output()
            .context("cargo nextest list")?;
        if !cargo_output.status.success() {
            bail!("cargo nextest list failed");
        }
        parse_nextest_list(&serde_json::from_slice(&cargo_output.stdout)?)
    }

    fn run_tests(
        &self,
        selection: TestSelection,
        skipped_tests: &[Test],
        name_arguments: &[String],
    ) -> Result<TestCounts> {
        let report_path = junit_report_path(&install::target_folder()?);
        let _ = fs::remove_file(&report_path);
        let mut command = self.nextest_command("run", selection)?;
        command.arg("--no-fail-fast");
        if !skipped_tests.is_empty() {
            command.args(["-E", &exclusion_filter(skipped_tests)]);
        }
        let status = command
            .args(name_arguments)
            .status()
            .context("cargo nextest run")?;
        let text = fs::read_to_string(&report_path).unwrap_or_default();
        let counts = parse_report(&text);
        if !status.success() && counts.failed == 0 {
            bail!("cargo nextest ended with {status} and reports no failed test");
        }
        Ok(counts)
    }
}

/// Returns the path of nextest's JUnit report.
pub(crate) fn junit_report_path(target: &Path) -> PathBuf {
    target.join("nextest/default/junit.xml")
}

/// True if `name` is the name of a test. A function named `subprocess_…` is not a test: it runs in
/// a process that a test starts.
fn is_test(name: &str) -> bool {
    !name
        .rsplit("::")
        .next()
        .unwrap_or(name)
        .starts_with("subprocess_")
}

/// Returns the tests in the JSON output of `cargo nextest list`.
fn parse_nextest_list(list: &Value) -> Result<Vec<Test>> {
    let suites = list["rust-suites"].as_object().context("no suites")?;
    let mut tests = Vec::new();
    for (binary, suite) in suites {
        let path_value =
            |json_key: &str| PathBuf::from(suite[json_key].as_str().unwrap_or_default());
        let test_cases = suite["testcases"].as_object().into_iter().flatten();
        for (name, test) in test_cases.filter(|(name, _)| is_test(name)) {
            tests.push(Test {
                binary: binary.clone(),
                name: name.clone(),
                is_ignored: test["ignored"] == true,
                binary_path: path_value("binary-path"),
                package_folder: path_value("cwd"),
            });
        }
    }
    Ok(tests)
}

/// Returns nextest's filter expression that excludes `tests`.
fn exclusion_filter(tests: &[Test]) -> String {
    let mut binaries: Vec<&str> = tests.iter().map(|test| test.binary.as_str()).collect();
    binaries.sort_unstable();
    binaries.dedup();
    let binary_filter = |binary: &str| {
        let names: Vec<String> = tests
            .iter()
            .filter(|test| test.binary == binary)
            .map(|test| format!("test(={})", test.name))
            .collect();
        format!("(binary_id(={binary}) & ({}))", names.join(" | "))
    };
    let binary_filters: Vec<String> = binaries.into_iter().map(binary_filter).collect();
    format!("not ({})", binary_filters.join(" | "))
}

/// Returns the numbers of passed and failed tests from a JUnit report.
fn parse_report(report: &str) -> TestCounts {
    let parse_attribute = |name: &str| {
        let after_element_name = report.split_once("<testsuites ")?.1;
        let value = after_element_name.split_once(&format!(" {name}=\""))?.1;
        value.split('"').next()?.parse::<usize>().ok()
    };
    let attribute_or_zero = |name| parse_attribute(name).unwrap_or(0);
    let failed_count = attribute_or_zero("failures") + attribute_or_zero("errors");
    TestCounts {
        passed: attribute_or_zero("tests").saturating_sub(failed_count),
        failed: failed_count,
        flaky: report.matches("<flakyFailure").count() + report.matches("<flakyError").count(),
    }
}

/// Runs the test binaries one after the other, each with two threads.
struct Libtest {
    profile: String,
}

struct TestBinary {
    /// Name of the binary in nextest's form.
    id: String,
    /// Names of the functions in the binary that are not tests ([`is_test`]).
    child_functions: Vec<String>,
    binary_path: PathBuf,
    package_folder: PathBuf,
}

impl Libtest {
    fn build_binaries(&self, selection: TestSelection) -> Result<Vec<TestBinary>> {
        let arguments = ["test", "--locked", "--no-run", "--message-format", "json"];
        let mut command = install::cargo_command(&arguments)?;
        let cargo_output = command
            .args(["--profile", &self.profile])
            .args(selection.packages)
            .stderr(Stdio::inherit())
            .output()
            .context("cargo test")?;
        if !cargo_output.status.success() {
            bail!("the build of the tests failed");
        }
        let lines = String::from_utf8_lossy(&cargo_output.stdout);
        let messages = lines
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok());
        let mut binaries: Vec<TestBinary> = messages
            .filter_map(|message| parse_test_binary(&message))
            .collect();
        for binary in &mut binaries {
            let names = list_names(binary, &["--list", "--format", "terse"])?;
            binary.child_functions = names.into_iter().filter(|name| !is_test(name)).collect();
        }
        Ok(binaries)
    }

    fn binary_command(binary: &TestBinary, arguments: &[&str], env: &[(&str, String)]) -> Command {
        let mut command = Command::new(&binary.binary_path);
        command
            .args(arguments)
            .current_dir(&binary.package_folder)
            .env("CARGO_MANIFEST_DIR", &binary.package_folder)
            .envs(env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null());
        command
    }
}

/// Returns the test binary that a JSON message of cargo describes; `None` if the message does not
/// describe a test binary.
fn parse_test_binary(message: &Value) -> Option<TestBinary> {
    let path = message["executable"].as_str()?;
    if message["profile"]["test"] != true {
        return None;
    }
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?;
    let manifest = fs::read_to_string(folder.join("Cargo.toml")).ok()?;
    let package = manifest
        .lines()
        .find_map(|line| line.strip_prefix("name = \""))?
        .trim_end_matches('"');
    let target = message["target"]["name"].as_str()?;
    let kind = message["target"]["kind"][0].as_str()?;
    let id = match kind {
        "test" => format!("{package}::{target}"),
        "bin" | "bench" | "example" => format!("{package}::{kind}/{target}"),
        _ => package.to_string(),
    };
    Some(TestBinary {
        id,
        child_functions: Vec::new(),
        binary_path: path.into(),
        package_folder: folder.to_path_buf(),
    })
}

/// Runs a test binary with the arguments `arguments`, which request a list. Returns the names of
/// the tests in the list.
fn list_names(binary: &TestBinary, arguments: &[&str]) -> Result<Vec<String>> {
    let binary_output = Libtest::binary_command(binary, arguments, &[]).output()?;
    let text = String::from_utf8_lossy(&binary_output.stdout);
    let names = text.lines().filter_map(|line| line.strip_suffix(": test"));
    Ok(names.map(String::from).collect())
}

impl TestRunner for Libtest {
    fn build_and_list(&self, selection: TestSelection) -> Result<Vec<Test>> {
        let mut tests = Vec::new();
        for binary in self.build_binaries(selection)? {
            let ignored_names = list_names(&binary, &["--list", "--format", "terse", "--ignored"])?;
            let names = list_names(&binary, &["--list", "--format", "terse"])?;
            for name in names.into_iter().filter(|name| is_test(name)) {
                tests.push(Test {
                    binary: binary.id.clone(),
                    is_ignored: ignored_names.contains(&name),
                    name,
                    binary_path: binary.binary_path.clone(),
                    package_folder: binary.package_folder.clone(),
                });
            }
        }
        Ok(tests)
    }

    fn run_tests(
        &self,
        selection: TestSelection,
        skipped_tests: &[Test],
        name_arguments: &[String],
    ) -> Result<TestCounts> {
        let mut counts = TestCounts::default();
        for binary in self.build_binaries(selection)? {
            let mut libtest_arguments = vec!["--include-ignored", "--test-threads", "2"];
            let skipped_in_binary = skipped_tests.iter().filter(|test| test.binary == binary.id);
            let mut names: Vec<&str> = skipped_in_binary.map(|test| test.name.as_str()).collect();
            let child_names = binary.child_functions.iter().map(String::as_str);
            names.extend(child_names);
            libtest_arguments.extend(names.iter().flat_map(|name| ["--skip", name]));
            // `name_arguments` are parts of test names. The exact names of skipped tests can be
            // passed only if there are no such parts.
            if !names.is_empty() && name_arguments.is_empty() {
                libtest_arguments.push("--exact");
            }
            libtest_arguments.extend(name_arguments.iter().map(String::as_str));
            println!("test: {}", binary.id);
            let binary_output = Self::binary_command(&binary, &libtest_arguments, selection.env)
                .stderr(Stdio::inherit())
                .output()
                .with_context(|| binary.binary_path.display().to_string())?;
            let text = String::from_utf8_lossy(&binary_output.stdout);
            print!("{text}");
            let binary_counts = sum_results(&text);
            if !binary_output.status.success() && binary_counts.failed == 0 {
                bail!("{} ended with {}", binary.id, binary_output.status);
            }
            counts += binary_counts;
        }
        Ok(counts)
    }
}

/// Sums the numbers in the result lines of test binaries: `test result: ok. 5 passed; 0 failed; …`.
pub(crate) fn sum_results(text: &str) -> TestCounts {
    let mut counts = TestCounts::default();
    for line in text
        .lines()
        .filter(|line| line.starts_with("test result: "))
    {
        let count_before = |label: &str| {
            let text_before = line.split_once(label)?.0;
            text_before
                .rsplit([' ', '.'])
                .find(|word| !word.is_empty())?
                .parse()
                .ok()
        };
        counts.passed += count_before(" passed").unwrap_or(0);
        counts.failed += count_before(" failed").unwrap_or(0);
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_is_counted() {
        let report = "<?xml?>\n<testsuites name=\"nextest-run\" tests=\"7\" failures=\"2\" errors=\"0\" uuid=\"x\">\n<flakyFailure type=\"test failure\">";
        let counts = TestCounts {
            passed: 5,
            failed: 2,
            flaky: 1,
        };
        assert_eq!(parse_report(report), counts);
        assert_eq!(parse_report(""), TestCounts::default());
    }

    #[test]
    fn results_of_binaries_add_up() {
        let text = "test result: ok. 5 passed; 0 failed; 1 ignored\n\
                    test result: FAILED. 2 passed; 3 failed; 0 ignored\n";
        let counts = TestCounts {
            passed: 7,
            failed: 3,
            flaky: 0,
        };
        assert_eq!(sum_results(text), counts);
    }

    #[test]
    fn filter_names_binary_and_test() {
        let test = |binary: &str, name: &str| Test {
            binary: binary.into(),
            name: name.into(),
            is_ignored: true,
            binary_path: PathBuf::new(),
            package_folder: PathBuf::new(),
        };
        let filter = exclusion_filter(&[test("a::b", "x"), test("a::b", "y"), test("c", "z")]);
        assert_eq!(
            filter,
            "not ((binary_id(=a::b) & (test(=x) | test(=y))) | (binary_id(=c) & (test(=z))))"
        );
    }

    /// A test belongs to the system tier if the list marks it as ignored.
    #[test]
    fn listed_tests_have_their_tier() {
        let list = serde_json::json!({"rust-suites": {"a::b": {"testcases": {
            "pure": {"ignored": false}, "real": {"ignored": true}}}}});
        let tests = parse_nextest_list(&list).expect("a list");
        let tiers: Vec<(&str, bool)> = tests
            .iter()
            .map(|test| (test.name.as_str(), test.is_ignored))
            .collect();
        assert_eq!(tiers, [("pure", false), ("real", true)]);
    }
}
