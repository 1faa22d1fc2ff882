//! The conformance suite: sentences about the interface of PVM 3, each checked by a C program in
//! `tests/conformance`.
//!
//! A program prints one line for each sentence, `ok SENTENCE` or `not ok SENTENCE: got …, wanted
//! …`, and finally `end`. The same programs run on three systems:
//!
//! - Debian's PVM 3.4.6, which proves that the programs are right;
//! - Sempa, compiled with our header;
//! - Sempa, with the binaries that were compiled and linked for Debian's library.
//!
//! If a sentence does not hold on a system, `differences.txt` lists the sentence, the system, and a
//! text of `docs/COMPATIBILITY.md` that explains the difference to users.

use crate::run::{CommandResult, run, run_ok};
use crate::testbed::{Host, Testbed, wait_until_no_process};
use crate::vm::{Settings, Vm};
use crate::{real_pvm::RealVm, requirements};
use anyhow::{Context, Result, bail, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Time limit for one program on a loaded machine. The programs' own timeouts are shorter.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(90);
/// Time limit for one compilation on a loaded machine.
const COMPILE_TIMEOUT: Duration = Duration::from_secs(120);
/// Time limit for a virtual machine to end after a program has halted it.
const HALT_TIMEOUT: Duration = Duration::from_secs(5);
/// Number of lines of a program's standard error that are shown in a report.
const STDERR_LINES_SHOWN: usize = 4;
/// Hosts of the testbed. Programs add the ones they need to the virtual machine.
const HOSTS: usize = 3;

/// A system on which the programs run, and the way they are built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum System {
    /// Debian's PVM 3.4.6 with its own library.
    Pvm3,
    /// Sempa, with programs compiled with our header and linked with our library.
    Sempa,
    /// Sempa, with programs compiled and linked for Debian's library.
    SempaUnchanged,
}

impl System {
    /// Returns the name of the system in tables and reports.
    pub fn name(self) -> &'static str {
        match self {
            System::Pvm3 => "pvm3",
            System::Sempa => "sempa",
            System::SempaUnchanged => "unchanged",
        }
    }

    /// True if `word`, the first column of a line in `differences.txt`, stands for this system.
    /// Both variants of Sempa have the same word.
    fn matches_word(self, word: &str) -> bool {
        word == if self == System::Pvm3 {
            "pvm3"
        } else {
            "sempa"
        }
    }
}

/// The result of one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Name of the program that has checked the sentence.
    pub program: String,
    pub sentence: String,
    /// `None` if the sentence holds; otherwise what the program observed and what it expected.
    pub failure: Option<String>,
}

impl Outcome {
    fn program_and_sentence(&self) -> (&str, &str) {
        (&self.program, &self.sentence)
    }
}

/// One line of `differences.txt`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The system on which the sentence does not hold: `pvm3` or `sempa`.
    pub system: String,
    pub sentence: String,
    /// A text of `docs/COMPATIBILITY.md` that explains the difference.
    pub explanation: String,
}

/// Returns the folder of the programs.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("conformance")
}

/// Returns the names of all programs.
///
/// # Errors
/// The folder cannot be read.
pub fn programs() -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder())? {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == "c" || end == "f") {
            names.push(
                path.file_stem()
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into_owned(),
            );
        }
    }
    names.sort();
    Ok(names)
}

/// Returns the known differences, each with its explanation in `docs/COMPATIBILITY.md`.
///
/// # Errors
/// A line is malformed, or its words are not in that page.
pub fn differences() -> Result<Vec<Difference>> {
    let text = fs::read_to_string(folder().join("differences.txt"))?;
    let page = fs::read_to_string(folder().join("../../docs/COMPATIBILITY.md"))?;
    let mut all = Vec::new();
    for line in text
        .lines()
        .filter(|line| !line.trim().is_empty() && !line.starts_with('#'))
    {
        let parts: Vec<&str> = line.split(" | ").map(str::trim).collect();
        let [system, sentence, explained] = parts[..] else {
            bail!("differences.txt: not three parts: {line}")
        };
        ensure!(
            ["pvm3", "sempa"].contains(&system),
            "differences.txt: no such system: {line}"
        );
        ensure!(
            page.contains(explained),
            "docs/COMPATIBILITY.md does not say: {explained}"
        );
        let own = |part: &str| part.to_string();
        all.push(Difference {
            system: own(system),
            sentence: own(sentence),
            explanation: own(explained),
        });
    }
    Ok(all)
}

/// Runs programs on a system, each on a new virtual machine. `chosen` are parts of program names;
/// if it is empty, all programs run.
///
/// # Errors
/// The system or the compiler does not work. A failed program is an outcome, not an error.
pub fn outcomes(system: System, chosen: &[String]) -> Result<Vec<Outcome>> {
    let prefix = if system == System::Pvm3 {
        None
    } else {
        Some(requirements::prefix()?)
    };
    let bed = Testbed::new(HOSTS, prefix.as_deref(), &[])?;
    let place = bed.home().join("pvm3/bin/LINUX64");
    let ours = prefix.as_deref().filter(|_| system == System::Sempa);
    let mut names = programs()?;
    names
        .retain(|name| chosen.is_empty() || chosen.iter().any(|part| name.contains(part.as_str())));
    compile(&names, ours, &place)?;
    provide_group_server(prefix.as_deref(), &place)?;
    let mut all = Vec::new();
    for name in names {
        let done = run_on_new_vm(&bed, system, &place.join(&name));
        all.extend(parse_outcomes(
            &name,
            done.map_err(|error| format!("{error:#}")),
        ));
    }
    Ok(all)
}

fn run_on_new_vm(bed: &Testbed, system: System, program: &Path) -> Result<CommandResult> {
    if system == System::Pvm3 {
        let vm = RealVm::start(bed)?;
        let done = run(vm.command(bed.host(1), program), PROGRAM_TIMEOUT);
        vm.halt()?;
        return done;
    }
    let vm = Vm::start(bed, Settings::default())?;
    let done = run(vm.command(bed.host(1), program), PROGRAM_TIMEOUT);
    let logs = if done.as_ref().is_ok_and(CommandResult::succeeded) {
        String::new()
    } else {
        vm.logs()
    };
    let left = |deadline| {
        bed.hosts()
            .iter()
            .try_for_each(|host| wait_until_no_process(host, "pvmd", deadline))
    };
    // The program may have halted the virtual machine.
    let halted = vm
        .halt()
        .or_else(|error| left(HALT_TIMEOUT).map_err(|_| error));
    if halted.is_err() {
        bed.hosts().iter().for_each(Host::kill_all);
        left(PROGRAM_TIMEOUT)?;
    }
    halted.with_context(|| format!("{done:?}\n{logs}"))?;
    done.with_context(|| logs)
}

/// Parses the outcomes in a program's output. If the program did not run to its end, adds an
/// outcome for that.
fn parse_outcomes(program: &str, done: Result<CommandResult, String>) -> Vec<Outcome> {
    let outcome = |sentence: &str, wrong: Option<String>| Outcome {
        program: program.to_string(),
        sentence: sentence.to_string(),
        failure: wrong,
    };
    let (text, trouble) = match &done {
        Ok(done) => (done.out.as_str(), None),
        Err(words) => (words.as_str(), Some(words.clone())),
    };
    let mut all: Vec<Outcome> = text
        .lines()
        .filter_map(|line| {
            let line = line.strip_prefix("stdout: ").unwrap_or(line);
            if let Some(sentence) = line.strip_prefix("ok ") {
                return Some(outcome(sentence, None));
            }
            let (sentence, wrong) = line.strip_prefix("not ok ")?.split_once(": ")?;
            Some(outcome(sentence, Some(wrong.to_string())))
        })
        .collect();
    let ended = done
        .as_ref()
        .is_ok_and(|done| done.succeeded() && done.out.lines().any(|line| line == "end"));
    if !ended {
        let last = all.last().map_or("its start".to_string(), |last| {
            format!("{:?}", last.sentence)
        });
        let words = trouble.unwrap_or_else(|| {
            done.as_ref().map_or(String::new(), |done| {
                format!("{}, its last words: {}", done.status, last_lines(&done.err))
            })
        });
        all.push(outcome(
            &exit_sentence(program),
            Some(format!("not after {last}: {words}")),
        ));
    }
    all
}

/// Returns the sentence that holds if a program exits with success.
fn exit_sentence(program: &str) -> String {
    format!("{program} runs to its end")
}

/// Returns the last lines of a text.
fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(STDERR_LINES_SHOWN)..].join(" / ")
}

/// Compiles the programs into the folder `place`: against our header and library in `ours`, or
/// against Debian's if `ours` is `None`.
fn compile(names: &[String], ours: Option<&Path>, place: &Path) -> Result<()> {
    let at_once = std::thread::available_parallelism()
        .map_or(1, usize::from)
        .min(names.len().max(1));
    std::thread::scope(|scope| {
        let parts = names.chunks(names.len().div_ceil(at_once).max(1));
        let workers: Vec<_> = parts
            .map(|part| {
                scope.spawn(|| {
                    part.iter()
                        .try_for_each(|name| compile_one(name, ours, place))
                })
            })
            .collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().expect("compiling does not panic"))
    })
}

fn compile_one(name: &str, ours: Option<&Path>, place: &Path) -> Result<()> {
    let source = folder().join(name);
    let (compiler, words, source, libraries): (_, &[&str], _, &[&str]) =
        if source.with_extension("c").exists() {
            (
                "gcc",
                &["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror"],
                source.with_extension("c"),
                &[],
            )
        } else {
            (
                "gfortran",
                &["-O1", "-w", "-fallow-argument-mismatch"],
                source.with_extension("f"),
                &["-lfpvm3"],
            )
        };
    let mut command = Command::new(compiler);
    command
        .args(words)
        .arg("-o")
        .arg(place.join(name))
        .arg(&source);
    match ours {
        Some(prefix) => command
            .arg("-I")
            .arg(prefix.join("include"))
            .arg("-L")
            .arg(prefix.join("lib")),
        // gfortran does not search this folder by default.
        None => command.arg("-I/usr/include"),
    };
    // PVM's examples are linked with both libraries, and so are these programs.
    command
        .args(libraries)
        .args(["-Wl,--no-as-needed", "-lgpvm3", "-lpvm3", "-lm"]);
    run_ok(command, COMPILE_TIMEOUT)
        .map(|_| ())
        .with_context(|| format!("compiling {}", source.display()))
}

/// Provides PVM's group server in the search path if the library is PVM's. Our library needs none.
fn provide_group_server(prefix: Option<&Path>, place: &Path) -> Result<()> {
    let own = prefix.is_some_and(|prefix| prefix.join("lib/libgpvm3.so.3").exists());
    if own {
        Ok(())
    } else {
        Ok(symlink("/usr/bin/pvmgs", place.join("pvmgs"))?)
    }
}

/// The result of a comparison of several systems.
#[derive(Debug, Default)]
pub struct Verdict {
    /// Unexplained results, one line each.
    pub unexplained: Vec<String>,
    /// Explained differences, one line each.
    pub explained: Vec<String>,
    /// Number of sentences that hold and number of all sentences, by program and system.
    pub table: BTreeMap<(String, System), (usize, usize)>,
    /// All sentences of all systems.
    pub sentences: BTreeSet<String>,
}

/// Compares the outcomes of all systems with the known differences. `whole` is true if all programs
/// have run; only then an unused difference is reported.
pub fn judge(runs: &[(System, Vec<Outcome>)], known: &[Difference], whole: bool) -> Verdict {
    let mut verdict = Verdict::default();
    for (system, outcomes) in runs {
        let mut seen = BTreeSet::new();
        for Outcome {
            program,
            sentence,
            failure: wrong,
        } in outcomes
        {
            let counts = verdict.table.entry((program.clone(), *system)).or_default();
            counts.0 += usize::from(wrong.is_none());
            counts.1 += 1;
            verdict.sentences.insert(sentence.clone());
            if !seen.insert(sentence.clone()) {
                verdict.unexplained.push(format!(
                    "{}: {program}: said twice: {sentence}",
                    system.name()
                ));
            }
            let about = |line: &&Difference| {
                line.sentence == *sentence && system.matches_word(&line.system)
            };
            match (known.iter().find(about), wrong) {
                (None, None) => {}
                (None, Some(wrong)) => {
                    verdict
                        .unexplained
                        .push(format!("{}: {program}: {sentence}: {wrong}", system.name()));
                }
                (Some(line), Some(_)) => {
                    verdict.explained.push(format!(
                        "{}: {sentence} ({})",
                        system.name(),
                        line.explanation
                    ));
                }
                (Some(_), None) => verdict.unexplained.push(format!(
                    "{}: {program}: {sentence}: it holds, differences.txt says it does not",
                    system.name()
                )),
            }
        }
        let missing = |line: &&Difference| {
            system.matches_word(&line.system) && !seen.contains(&line.sentence)
        };
        for line in known.iter().filter(missing).filter(|_| whole) {
            verdict
                .unexplained
                .push(format!("{}: nobody said: {}", system.name(), line.sentence));
        }
    }
    let said: BTreeSet<(&str, &str)> = runs
        .iter()
        .flat_map(|(_, all)| all)
        .map(Outcome::program_and_sentence)
        .collect();
    for (system, outcomes) in runs {
        let own: BTreeSet<(&str, &str)> =
            outcomes.iter().map(Outcome::program_and_sentence).collect();
        // A program that has failed is already listed as failed.
        let broken = |program: &str| own.contains(&(program, exit_sentence(program).as_str()));
        for (program, sentence) in said
            .difference(&own)
            .filter(|(program, _)| !broken(program))
        {
            if *sentence != exit_sentence(program) {
                verdict.unexplained.push(format!(
                    "{}: {program}: never said: {sentence}",
                    system.name()
                ));
            }
        }
    }
    verdict
}

impl Verdict {
    /// Returns a table with a line per program and a column per system.
    pub fn text(&self) -> String {
        let systems: BTreeSet<System> = self.table.keys().map(|(_, system)| *system).collect();
        let programs: BTreeSet<&String> = self.table.keys().map(|(program, _)| program).collect();
        let row = |name: &str, cells: Vec<String>| {
            format!(
                "{name:<16}{}\n",
                cells
                    .iter()
                    .map(|cell| format!("{cell:>14}"))
                    .collect::<String>()
            )
        };
        let cell = |good: usize, all: usize| {
            if good == all {
                format!("{all}")
            } else {
                format!("{good} of {all}")
            }
        };
        let mut text = row(
            "",
            systems
                .iter()
                .map(|system| system.name().to_string())
                .collect(),
        );
        for program in programs {
            let counts = systems
                .iter()
                .map(|system| self.table.get(&(program.clone(), *system)));
            text += &row(
                program,
                counts
                    .map(|both| both.map_or("-".into(), |(good, all)| cell(*good, *all)))
                    .collect(),
            );
        }
        let total = |system: &System| {
            let own = self.table.iter().filter(|((_, of), _)| of == system);
            own.fold((0, 0), |sum, (_, counts)| {
                (sum.0 + counts.0, sum.1 + counts.1)
            })
        };
        text += &row(
            "all",
            systems
                .iter()
                .map(total)
                .map(|(good, all)| cell(good, all))
                .collect(),
        );
        for (title, lines) in [
            ("explained", &self.explained),
            ("NOT EXPLAINED", &self.unexplained),
        ] {
            if !lines.is_empty() {
                text += &format!("\n{title}:\n  {}\n", lines.join("\n  "));
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    fn done(status: i32, out: &str) -> Result<CommandResult, String> {
        Ok(CommandResult {
            status: std::process::ExitStatus::from_raw(status),
            out: out.into(),
            err: String::new(),
        })
    }

    fn difference(system: &str, sentence: &str) -> Difference {
        Difference {
            system: system.into(),
            sentence: sentence.into(),
            explanation: "a defect".into(),
        }
    }

    fn unexplained(system: System, out: &str, known: &[Difference]) -> Vec<String> {
        judge(&[(system, parse_outcomes("p", done(0, out)))], known, true).unexplained
    }

    #[test]
    fn only_a_sentence_that_fails_is_unexplained() {
        assert!(unexplained(System::Sempa, "ok a\nend\n", &[]).is_empty());
        assert_eq!(
            unexplained(System::Sempa, "not ok a: got 1, wanted 2\nend\n", &[]),
            ["sempa: p: a: got 1, wanted 2"]
        );
    }

    #[test]
    fn a_known_difference_explains_its_own_system() {
        let (known, out) = (
            [difference("pvm3", "a")],
            "not ok a: got 1, wanted 2\nend\n",
        );
        assert!(unexplained(System::Pvm3, out, &known).is_empty());
        assert_eq!(unexplained(System::SempaUnchanged, out, &known).len(), 1);
        assert!(unexplained(System::SempaUnchanged, out, &[difference("sempa", "a")]).is_empty());
    }

    #[test]
    fn an_outdated_or_unused_difference_is_unexplained() {
        assert_eq!(
            unexplained(System::Pvm3, "ok a\nend\n", &[difference("pvm3", "a")]).len(),
            1
        );
        assert_eq!(
            unexplained(System::Pvm3, "ok b\nend\n", &[difference("pvm3", "a")]).len(),
            1
        );
    }

    #[test]
    fn a_failed_or_repeating_program_is_unexplained() {
        for outcome in [
            parse_outcomes("p", done(11, "ok a\n")),
            parse_outcomes("p", done(0, "ok a\n")),
            parse_outcomes("p", Err("stuck".into())),
        ] {
            assert_eq!(
                outcome.last().expect("it is said").sentence,
                "p runs to its end"
            );
            assert!(outcome.last().expect("it is said").failure.is_some());
        }
        assert_eq!(unexplained(System::Pvm3, "ok a\nok a\nend\n", &[]).len(), 1);
    }

    /// A sentence that one system has checked must be checked on all systems.
    #[test]
    fn sentence_missing_on_one_system_is_unexplained() {
        let runs = [
            (
                System::Pvm3,
                parse_outcomes("p", done(0, "ok a\nok b\nend\n")),
            ),
            (System::Sempa, parse_outcomes("p", done(0, "ok a\nend\n"))),
        ];
        assert_eq!(
            judge(&runs, &[], true).unexplained,
            ["sempa: p: never said: b"]
        );
    }
}
