//! Lists and runs the tests of the workspace. Uses nextest if it is installed; otherwise runs the
//! test binaries directly.

use crate::install;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A test function, as its test binary lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Test {
    /// Name of the test binary in nextest's form, such as `sempa-tests::drain`.
    pub(crate) binary: String,
    /// Name of the test within the binary.
    pub(crate) name: String,
    /// True if the test has the attribute `#[ignore]`, so that it belongs to the system tier.
    pub(crate) ignored: bool,
    /// Path of the test binary.
    pub(crate) path: PathBuf,
    /// Folder of the test's package. Tests run in this folder.
    pub(crate) folder: PathBuf,
}

/// Number of tests of a run, by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TestCounts {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
}

impl std::ops::AddAssign for TestCounts {
    fn add_assign(&mut self, other: TestCounts) {
        self.passed += other.passed;
        self.failed += other.failed;
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
        .is_ok_and(|done| done.status.success())
}

/// Lists and runs tests.
pub(crate) trait Runner {
    /// Builds the selected tests and lists them.
    fn list(&self, selection: TestSelection) -> Result<Vec<Test>>;
    /// Runs all tests of both tiers except for those in `skipped`. `words` are arguments that
    /// restrict the tests.
    fn run(
        &self,
        selection: TestSelection,
        skipped: &[Test],
        words: &[String],
    ) -> Result<TestCounts>;
}

/// Returns the runner for this machine: [`Nextest`] if nextest is installed, otherwise [`Libtest`].
pub(crate) fn runner(profile: &str) -> Box<dyn Runner> {
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
    fn command(&self, verb: &str, selection: TestSelection) -> Result<Command> {
        let mut command = install::cargo(&["nextest", verb, "--locked", "--cargo-profile"])?;
        command
            .arg(&self.profile)
            .args(selection.packages)
            .args(["--run-ignored", "all"])
            .stdin(Stdio::null());
        command.envs(selection.env.iter().map(|(name, value)| (name, value)));
        Ok(command)
    }
}

impl Runner for Nextest {
    fn list(&self, selection: TestSelection) -> Result<Vec<Test>> {
        let mut command = self.command("list", selection)?;
        let done = command
            .args(["--message-format", "json"])
            .stderr(Stdio::inherit())
            .output()
            .context("cargo nextest list")?;
        if !done.status.success() {
            bail!("cargo nextest list failed");
        }
        parse_nextest_list(&serde_json::from_slice(&done.stdout)?)
    }

    fn run(
        &self,
        selection: TestSelection,
        skipped: &[Test],
        words: &[String],
    ) -> Result<TestCounts> {
        let report = junit_report_path(&install::target_folder()?);
        let _ = fs::remove_file(&report);
        let mut command = self.command("run", selection)?;
        command.arg("--no-fail-fast");
        if !skipped.is_empty() {
            command.args(["-E", &exclusion_filter(skipped)]);
        }
        let status = command.args(words).status().context("cargo nextest run")?;
        let text = fs::read_to_string(&report).unwrap_or_default();
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

/// True if `name` is the name of a test. Functions named `child_…` are not tests: they run in
/// processes that tests start.
fn is_test(name: &str) -> bool {
    !name
        .rsplit("::")
        .next()
        .unwrap_or(name)
        .starts_with("child_")
}

/// Returns the tests in the JSON output of `cargo nextest list`.
fn parse_nextest_list(list: &Value) -> Result<Vec<Test>> {
    let suites = list["rust-suites"].as_object().context("no suites")?;
    let mut tests = Vec::new();
    for (binary, suite) in suites {
        let text = |key: &str| PathBuf::from(suite[key].as_str().unwrap_or_default());
        let cases = suite["testcases"].as_object().into_iter().flatten();
        for (name, test) in cases.filter(|(name, _)| is_test(name)) {
            tests.push(Test {
                binary: binary.clone(),
                name: name.clone(),
                ignored: test["ignored"] == true,
                path: text("binary-path"),
                folder: text("cwd"),
            });
        }
    }
    Ok(tests)
}

/// Returns nextest's filter expression that excludes these tests.
fn exclusion_filter(tests: &[Test]) -> String {
    let mut binaries: Vec<&str> = tests.iter().map(|test| test.binary.as_str()).collect();
    binaries.sort_unstable();
    binaries.dedup();
    let of = |binary: &str| {
        let names: Vec<String> = tests
            .iter()
            .filter(|test| test.binary == binary)
            .map(|test| format!("test(={})", test.name))
            .collect();
        format!("(binary_id(={binary}) & ({}))", names.join(" | "))
    };
    let all: Vec<String> = binaries.into_iter().map(of).collect();
    format!("not ({})", all.join(" | "))
}

/// Returns the number of tests in a JUnit report, by outcome.
fn parse_report(report: &str) -> TestCounts {
    let number = |name: &str| {
        let head = report.split_once("<testsuites ")?.1;
        let value = head.split_once(&format!(" {name}=\""))?.1;
        value.split('"').next()?.parse::<usize>().ok()
    };
    let of = |name| number(name).unwrap_or(0);
    let failed = of("failures") + of("errors");
    TestCounts {
        passed: of("tests").saturating_sub(failed),
        failed,
    }
}

/// Runs the test binaries one after the other, each with two threads.
struct Libtest {
    profile: String,
}

struct TestBinary {
    id: String,
    /// Names of functions that are not tests: they run in processes that tests start.
    children: Vec<String>,
    path: PathBuf,
    folder: PathBuf,
}

impl Libtest {
    fn binaries(&self, selection: TestSelection) -> Result<Vec<TestBinary>> {
        let words = ["test", "--locked", "--no-run", "--message-format", "json"];
        let mut command = install::cargo(&words)?;
        let done = command
            .args(["--profile", &self.profile])
            .args(selection.packages)
            .stderr(Stdio::inherit())
            .output()
            .context("cargo test")?;
        if !done.status.success() {
            bail!("the build of the tests failed");
        }
        let lines = String::from_utf8_lossy(&done.stdout);
        let messages = lines
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok());
        let mut binaries: Vec<TestBinary> = messages
            .filter_map(|message| parse_test_binary(&message))
            .collect();
        for binary in &mut binaries {
            let names = list_names(binary, &["--list", "--format", "terse"])?;
            binary.children = names.into_iter().filter(|name| !is_test(name)).collect();
        }
        Ok(binaries)
    }

    fn words(binary: &TestBinary, words: &[&str], env: &[(&str, String)]) -> Command {
        let mut command = Command::new(&binary.path);
        command
            .args(words)
            .current_dir(&binary.folder)
            .env("CARGO_MANIFEST_DIR", &binary.folder)
            .envs(env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null());
        command
    }
}

/// Returns the test binary that a JSON message of cargo describes; `None` if the message describes
/// something else.
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
        children: Vec::new(),
        path: path.into(),
        folder: folder.to_path_buf(),
    })
}

/// Runs a test binary with list arguments. Returns the names of the tests that it prints.
fn list_names(binary: &TestBinary, words: &[&str]) -> Result<Vec<String>> {
    let done = Libtest::words(binary, words, &[]).output()?;
    let text = String::from_utf8_lossy(&done.stdout);
    let names = text.lines().filter_map(|line| line.strip_suffix(": test"));
    Ok(names.map(String::from).collect())
}

impl Runner for Libtest {
    fn list(&self, selection: TestSelection) -> Result<Vec<Test>> {
        let mut tests = Vec::new();
        for binary in self.binaries(selection)? {
            let ignored = list_names(&binary, &["--list", "--format", "terse", "--ignored"])?;
            let all = list_names(&binary, &["--list", "--format", "terse"])?;
            for name in all.into_iter().filter(|name| is_test(name)) {
                tests.push(Test {
                    binary: binary.id.clone(),
                    ignored: ignored.contains(&name),
                    name,
                    path: binary.path.clone(),
                    folder: binary.folder.clone(),
                });
            }
        }
        Ok(tests)
    }

    fn run(
        &self,
        selection: TestSelection,
        skipped: &[Test],
        words: &[String],
    ) -> Result<TestCounts> {
        let mut counts = TestCounts::default();
        for binary in self.binaries(selection)? {
            let mut all = vec!["--include-ignored", "--test-threads", "2"];
            let of = skipped.iter().filter(|test| test.binary == binary.id);
            let mut names: Vec<&str> = of.map(|test| test.name.as_str()).collect();
            let children = binary.children.iter().map(String::as_str);
            names.extend(children);
            all.extend(names.iter().flat_map(|name| ["--skip", name]));
            // The words are parts of test names. Exact names are possible only if there are no
            // words.
            if !names.is_empty() && words.is_empty() {
                all.push("--exact");
            }
            all.extend(words.iter().map(String::as_str));
            println!("test: {}", binary.id);
            let done = Libtest::words(&binary, &all, selection.env)
                .stderr(Stdio::inherit())
                .output()
                .with_context(|| binary.path.display().to_string())?;
            let text = String::from_utf8_lossy(&done.stdout);
            print!("{text}");
            let of_this = sum_results(&text);
            if !done.status.success() && of_this.failed == 0 {
                bail!("{} ended with {}", binary.id, done.status);
            }
            counts += of_this;
        }
        Ok(counts)
    }
}

/// Sums the result lines of test binaries: `test result: ok. 5 passed; 0 failed; …`.
pub(crate) fn sum_results(text: &str) -> TestCounts {
    let mut counts = TestCounts::default();
    for line in text
        .lines()
        .filter(|line| line.starts_with("test result: "))
    {
        let number = |of: &str| {
            let before = line.split_once(of)?.0;
            before
                .rsplit([' ', '.'])
                .find(|word| !word.is_empty())?
                .parse()
                .ok()
        };
        counts.passed += number(" passed").unwrap_or(0);
        counts.failed += number(" failed").unwrap_or(0);
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The counts of a report are in its first element.
    #[test]
    fn report_is_counted() {
        let report = "<?xml?>\n<testsuites name=\"nextest-run\" tests=\"7\" failures=\"2\" errors=\"0\" uuid=\"x\">";
        let counts = TestCounts {
            passed: 5,
            failed: 2,
        };
        assert_eq!(parse_report(report), counts);
        assert_eq!(parse_report(""), TestCounts::default());
    }

    /// The counts of several binaries are added.
    #[test]
    fn results_of_binaries_add_up() {
        let text = "test result: ok. 5 passed; 0 failed; 1 ignored\n\
                    test result: FAILED. 2 passed; 3 failed; 0 ignored\n";
        let counts = TestCounts {
            passed: 7,
            failed: 3,
        };
        assert_eq!(sum_results(text), counts);
    }

    /// The filter contains each excluded test with its binary.
    #[test]
    fn filter_names_binary_and_test() {
        let test = |binary: &str, name: &str| Test {
            binary: binary.into(),
            name: name.into(),
            ignored: true,
            path: PathBuf::new(),
            folder: PathBuf::new(),
        };
        let filter = exclusion_filter(&[test("a::b", "x"), test("a::b", "y"), test("c", "z")]);
        assert_eq!(
            filter,
            "not ((binary_id(=a::b) & (test(=x) | test(=y))) | (binary_id(=c) & (test(=z))))"
        );
    }

    /// The list has for each test whether it belongs to the system tier.
    #[test]
    fn list_tells_the_tier() {
        let list = serde_json::json!({"rust-suites": {"a::b": {"testcases": {
            "pure": {"ignored": false}, "real": {"ignored": true}}}}});
        let tests = parse_nextest_list(&list).expect("a list");
        let tiers: Vec<(&str, bool)> = tests
            .iter()
            .map(|test| (test.name.as_str(), test.ignored))
            .collect();
        assert_eq!(tiers, [("pure", false), ("real", true)]);
    }
}
