//! Runs Debian's PVM programs, and the examples built from Debian's sources, on PVM 3.4.6 and on
//! Sempa. Converts the outputs to forms that tests compare, with masked tids or numbers.

use crate::real_pvm::RealVm;
use crate::run::{CommandResult, RunningCommand, run_to_end, wait_for};
use crate::vm::{Vm, VmSettings};
use crate::{Host, Testbed, pvm_examples, requirements};
use anyhow::{Context, Result, bail};
use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Time limit for one program on a loaded machine.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(40);
/// Maximum number of runs on PVM. A run is repeated because PVM itself sometimes fails.
const PVM_ATTEMPTS_MAX: usize = 3;
/// Number of hosts of each virtual machine.
const HOST_COUNT: usize = 3;
/// The smallest number that counts as a tid.
const TID_MIN: u64 = 0x40000;

/// The output of a case; an error contains the reason why there is no output.
pub type CaseOutput = Result<String, String>;

/// A system, and the set of programs that runs on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum System {
    /// PVM 3.4.6 with Debian's programs.
    Pvm,
    /// Sempa with Debian's programs.
    SempaDebianPrograms,
    /// Sempa with PVM's examples, built with our headers and libraries, and with the remaining
    /// programs of Debian.
    SempaBuiltPrograms,
}

/// A virtual machine of three hosts, of PVM or of Sempa.
#[derive(Debug)]
pub struct ComparedVm<'a> {
    testbed: &'a Testbed,
    vm: PvmOrSempa<'a>,
    /// The folder that is searched first for programs.
    program_folder: PathBuf,
}

#[derive(Debug)]
enum PvmOrSempa<'a> {
    Pvm(RealVm<'a>),
    Sempa(Vm<'a>),
}

/// A program with arguments and standard input, which runs on a host.
#[derive(Clone, Copy, Debug)]
pub struct ProgramRun<'a> {
    /// Number of the host, counted from 1.
    pub host_number: usize,
    /// Name of the program, which is in the search path.
    pub program: &'a str,
    pub arguments: &'a [&'a str],
    pub input: &'a str,
}

/// Returns a run of `program` on h1 without arguments and input.
pub fn without_arguments(program: &str) -> ProgramRun<'_> {
    ProgramRun {
        host_number: 1,
        program,
        arguments: &[],
        input: "",
    }
}

/// Returns a run of `program` on h1 with these arguments and without input.
pub fn with_arguments<'a>(program: &'a str, arguments: &'a [&'a str]) -> ProgramRun<'a> {
    ProgramRun {
        arguments,
        ..without_arguments(program)
    }
}

impl ComparedVm<'_> {
    /// Returns a command that runs `program` on a host with the environment variables of this
    /// virtual machine.
    pub fn command(&self, host: &Host, program: impl AsRef<Path>) -> Command {
        match &self.vm {
            PvmOrSempa::Pvm(vm) => vm.command(host, program),
            PvmOrSempa::Sempa(vm) => vm.user_command(host, program),
        }
    }

    /// As [`ComparedVm::command`], for a program in the folder of built programs or one of Debian's
    /// programs. The output of the program is line buffered.
    fn line_buffered_command(&self, host: &Host, program: &str) -> Command {
        let mut command = self.command(host, "/usr/bin/stdbuf");
        command
            .arg("-oL")
            .arg(program_path(&self.program_folder, program));
        command
    }

    pub fn testbed(&self) -> &Testbed {
        self.testbed
    }

    /// Starts a program and returns without waiting for its end.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(&self, program_run: ProgramRun) -> Result<RunningCommand> {
        self.start_prepared(program_run, |_| {})
    }

    /// As [`ComparedVm::start`]. Calls `prepare` with the command before the program starts.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start_prepared(
        &self,
        program_run: ProgramRun,
        prepare: impl FnOnce(&mut Command),
    ) -> Result<RunningCommand> {
        let mut command = self.line_buffered_command(
            self.testbed.host(program_run.host_number),
            program_run.program,
        );
        command.args(program_run.arguments);
        prepare(&mut command);
        if program_run.input.is_empty() {
            return RunningCommand::start(command, Stdio::null());
        }
        let mut running_program = RunningCommand::start(command, Stdio::piped())?;
        let mut input_pipe = running_program.take_stdin().context("its input is piped")?;
        input_pipe.write_all(program_run.input.as_bytes())?;
        Ok(running_program)
    }

    /// Runs a program to its end. Returns its output, exit status and error output as one text.
    ///
    /// # Errors
    /// The program does not start or does not end.
    pub fn run_to_end(&self, program_run: ProgramRun) -> Result<String> {
        Ok(self.result_text(&self.start(program_run)?.wait_or_kill(PROGRAM_TIMEOUT)?))
    }

    /// Returns output, exit status and error output as one text. The path of the testbed's folder
    /// is masked, and the folder of built programs is replaced by `/usr/bin`.
    pub fn result_text(&self, result: &CommandResult) -> String {
        let status = result
            .status
            .code()
            .map_or_else(|| result.status.to_string(), |code| format!("exit {code}"));
        let text = format!("{}\n[{status}]\n{}", result.stdout, result.stderr);
        let text = text.replace(&format!("{}/", self.program_folder.display()), "/usr/bin/");
        text.replace(&self.testbed.folder().display().to_string(), "FOLDER")
    }

    /// Writes commands to the input of Debian's console, waits until its output contains
    /// `awaited_text`, and writes `quit`. Returns all output.
    ///
    /// # Errors
    /// The output does not contain `awaited_text` within the time limit, or the console fails.
    pub fn run_console(&self, commands: &str, awaited_text: &str) -> Result<String> {
        let command = self.line_buffered_command(self.testbed.host(1), "pvm");
        let mut running_console = RunningCommand::start(command, Stdio::piped())?;
        let mut input_pipe = running_console.take_stdin().context("its input is piped")?;
        input_pipe.write_all(commands.as_bytes())?;
        wait_for(PROGRAM_TIMEOUT, || match running_console.stdout_so_far() {
            Ok(out) if out.contains(awaited_text) => Ok(()),
            other => Err(format!("no {awaited_text:?} in: {other:?}")),
        })?;
        if let Err(error) = input_pipe.write_all(b"quit\n") {
            bail!(
                "the console takes nothing more: {error}; {:?}",
                running_console.wait_or_kill(PROGRAM_TIMEOUT)?
            );
        }
        drop(input_pipe);
        Ok(self.result_text(&running_console.wait_or_kill(PROGRAM_TIMEOUT)?))
    }

    /// Waits until the output of a running program contains `text`.
    ///
    /// # Errors
    /// The output does not contain `text` within the time limit.
    pub fn wait_until_printed(&self, running_program: &RunningCommand, text: &str) -> Result<()> {
        wait_for(PROGRAM_TIMEOUT, || match running_program.stdout_so_far() {
            Ok(out) if out.contains(text) => Ok(()),
            other => Err(format!("no {text:?} in {other:?}")),
        })
    }

    /// Waits until a program that was started from a command line has connected to the virtual
    /// machine. The console that lists the tasks does not count.
    ///
    /// # Errors
    /// No program connects within the time limit.
    pub fn wait_for_connection(&self) -> Result<()> {
        wait_for(PROGRAM_TIMEOUT, || {
            match self.run_console("ps -ax\n", "\n") {
                Ok(out)
                    if out
                        .lines()
                        .any(|line| line.contains("4/c -") && !line.contains("(cons)")) =>
                {
                    Ok(())
                }
                other => Err(format!("nothing has connected: {other:?}")),
            }
        })
    }

    /// Waits until the mailbox contains `name`.
    ///
    /// # Errors
    /// The name is not in the mailbox within the time limit.
    pub fn wait_until_in_mailbox(&self, name: &str) -> Result<()> {
        wait_for(PROGRAM_TIMEOUT, || {
            match self.run_to_end(without_arguments("gmbi")) {
                Ok(out) if out.contains(name) => Ok(()),
                other => Err(format!("no {name:?} in {other:?}")),
            }
        })
    }

    /// Repeats a command of Debian's console until the output contains `text`. Each run of blanks
    /// and line ends in the output counts as one blank.
    ///
    /// # Errors
    /// The output does not contain `text` within the time limit.
    pub fn wait_until_console_shows(&self, command: &str, text: &str) -> Result<()> {
        wait_for(PROGRAM_TIMEOUT, || match self.run_console(command, "\n") {
            Ok(out)
                if out
                    .split_whitespace()
                    .collect::<Vec<_>>()
                    .join(" ")
                    .contains(text) =>
            {
                Ok(())
            }
            other => Err(format!("no {text:?} in {other:?}")),
        })
    }

    fn halt_and_wait(self) -> Result<()> {
        match self.vm {
            PvmOrSempa::Pvm(vm) => vm.halt_or_kill(),
            PvmOrSempa::Sempa(vm) => vm.halt_and_wait(),
        }
    }
}

/// Calls `run_cases`, which runs the cases, on several systems in parallel, each on three hosts.
/// Returns the outputs of the cases by system.
///
/// # Panics
/// The machine does not meet a requirement, a system does not start, or `run_cases` fails.
pub fn run_on_systems<const N: usize>(
    systems: [System; N],
    run_cases: impl Fn(&ComparedVm) -> Result<Vec<CaseOutput>> + Sync,
) -> [Vec<CaseOutput>; N] {
    requirements::panic_if_unmet(requirements::unmet_requirement());
    if systems.contains(&System::SempaBuiltPrograms) {
        requirements::panic_if_unmet(pvm_examples::unmet_requirement());
    }
    std::thread::scope(|scope| {
        let run_cases = &run_cases;
        let case_threads = systems.map(|system| {
            (
                system,
                scope.spawn(move || run_on_system(system, run_cases)),
            )
        });
        case_threads.map(|(system, thread)| match thread.join() {
            Ok(Ok(outputs)) => outputs,
            Ok(Err(error)) => panic!("{system:?}: {error:#}"),
            Err(_) => panic!("{system:?}: a panic in its run"),
        })
    })
}

fn run_on_system(
    system: System,
    run_cases: &dyn Fn(&ComparedVm) -> Result<Vec<CaseOutput>>,
) -> Result<Vec<CaseOutput>> {
    if system == System::Pvm {
        return run_on_pvm_with_retries(run_cases);
    }
    let prefix = requirements::installed_prefix()?;
    let testbed = Testbed::new(HOST_COUNT, Some(&prefix), &[])?;
    if system == System::SempaBuiltPrograms {
        pvm_examples::build_all(&prefix, &built_program_folder(&testbed))?;
    }
    let program_folder = link_programs_for_spawn(&testbed)?;
    let vm = Vm::start(&testbed, VmSettings::default())?;
    vm.add_hosts(&["h2", "h3"])?;
    run_and_halt(
        ComparedVm {
            testbed: &testbed,
            vm: PvmOrSempa::Sempa(vm),
            program_folder,
        },
        run_cases,
    )
}

/// Runs the cases on PVM, at most [`PVM_ATTEMPTS_MAX`] times until no case fails.
///
/// The first task that joins a group starts PVM's group server. On a loaded machine tasks that join
/// at the same time start several servers. All servers but one end, and a task that has sent a
/// request to a server that ends fails ("Could not join group").
fn run_on_pvm_with_retries(
    run_cases: &dyn Fn(&ComparedVm) -> Result<Vec<CaseOutput>>,
) -> Result<Vec<CaseOutput>> {
    for _ in 1..PVM_ATTEMPTS_MAX {
        let error = match run_on_pvm(run_cases) {
            Ok(outputs) => match outputs.iter().find_map(|output| output.as_ref().err()) {
                Some(error) => error.clone(),
                None => return Ok(outputs),
            },
            Err(error) => format!("{error:#}"),
        };
        eprintln!("PVM 3.4.6 failed itself, it is run again: {error}");
    }
    run_on_pvm(run_cases)
}

fn run_on_pvm(
    run_cases: &dyn Fn(&ComparedVm) -> Result<Vec<CaseOutput>>,
) -> Result<Vec<CaseOutput>> {
    let testbed = Testbed::new(HOST_COUNT, None, &[])?;
    let program_folder = link_programs_for_spawn(&testbed)?;
    let vm = RealVm::start(&testbed)?;
    let mut console =
        RunningCommand::start(vm.command(testbed.host(1), "/usr/bin/pvm"), Stdio::piped())?;
    console
        .take_stdin()
        .context("its input is piped")?
        .write_all(b"add h2 h3\n")?;
    let add_result = console.wait_or_kill(PROGRAM_TIMEOUT)?;
    if !add_result.stdout.contains("2 successful") {
        bail!("{add_result:?}");
    }
    run_and_halt(
        ComparedVm {
            testbed: &testbed,
            vm: PvmOrSempa::Pvm(vm),
            program_folder,
        },
        run_cases,
    )
}

fn run_and_halt(
    compared_vm: ComparedVm,
    run_cases: &dyn Fn(&ComparedVm) -> Result<Vec<CaseOutput>>,
) -> Result<Vec<CaseOutput>> {
    let result = run_cases(&compared_vm);
    if let (Err(error), PvmOrSempa::Sempa(vm)) = (&result, &compared_vm.vm) {
        eprintln!("{error:#}\n{}", vm.events_and_logs());
    }
    let halt_result = compared_vm.halt_and_wait();
    let result = result?;
    halt_result.map(|()| result)
}

/// Returns the folder of the examples that the tests build. The folder may not exist.
fn built_program_folder(testbed: &Testbed) -> PathBuf {
    testbed.folder().join("built")
}

/// Returns the path of a program: in `program_folder` if it exists there, otherwise Debian's.
fn program_path(program_folder: &Path, name: &str) -> PathBuf {
    let built_program = program_folder.join(name);
    if built_program.exists() {
        built_program
    } else {
        Path::new("/usr/bin").join(name)
    }
}

fn link_programs_for_spawn(testbed: &Testbed) -> Result<PathBuf> {
    let (link_folder, program_folder) = (
        testbed.root_home().join("pvm3/bin/LINUX64"),
        built_program_folder(testbed),
    );
    let package_files = run_to_end(
        {
            let mut list_command = Command::new("dpkg-query");
            list_command.args(["-L", "pvm-examples"]);
            list_command
        },
        PROGRAM_TIMEOUT,
    )?;
    let program_names = package_files
        .stdout
        .lines()
        .filter_map(|line| line.strip_prefix("/usr/bin/"));
    for name in program_names.chain(["pvmgs"]) {
        symlink(program_path(&program_folder, name), link_folder.join(name))
            .with_context(|| name.to_string())?;
    }
    let slang_folder = Path::new("/usr/share/doc/slang-pvm/examples");
    for name in ["hello_master", "hello_slave", "master", "slave"] {
        let Ok(script) = fs::read_to_string(slang_folder.join(name)) else {
            continue;
        };
        let script_copy = testbed.root_home().join(name);
        // The script contains the name of its author's host.
        fs::write(&script_copy, script.replace("\"pirx\"", "\"h2\""))?;
        fs::set_permissions(&script_copy, fs::Permissions::from_mode(0o755))?;
    }
    Ok(program_folder)
}

/// The form in which two texts are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComparedForm {
    /// All lines in order; tids are masked.
    OrderedLines,
    /// All lines in any order; tids are masked.
    SortedLines,
    /// All lines in order; all numbers are masked.
    OrderedShapes,
    /// The set of different lines; all numbers are masked.
    ShapeSet,
}

/// Converts a text to the form `form`. Also removes empty lines and lines that contain only a
/// prompt.
pub fn normalize_output(text: &str, form: ComparedForm) -> String {
    let masks_all_numbers = matches!(form, ComparedForm::OrderedShapes | ComparedForm::ShapeSet);
    let ignores_order = matches!(form, ComparedForm::SortedLines | ComparedForm::ShapeSet);
    // The console's prompt may precede output that arrives at any time, so it is removed if the
    // order does not matter.
    let strip_prompt = |line: String| {
        if ignores_order {
            line.trim_start_matches("pvm> ").to_string()
        } else {
            line
        }
    };
    let lines = text
        .lines()
        .map(|line| strip_prompt(mask_numbers(line, masks_all_numbers)));
    let mut lines: Vec<String> = lines
        .filter(|line| !line.is_empty() && line != "pvm>")
        .collect();
    if ignores_order {
        lines.sort();
    }
    if form == ComparedForm::ShapeSet {
        lines.dedup();
    }
    lines.join("\n")
}

/// Returns a line with single blanks and masked tids. A tid is a number of at least five
/// hexadecimal digits after `t`, `0x` or `id: `, or a decimal number from [`TID_MIN`] to 2^30 - 1.
/// If `masks_all` is true, masks all numbers.
fn mask_numbers(line: &str, masks_all: bool) -> String {
    let mut out = String::new();
    let chars: Vec<char> = line
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
        .chars()
        .collect();
    let mut index = 0;
    while index < chars.len() {
        let previous_char = if index == 0 { ' ' } else { chars[index - 1] };
        let rest = &chars[index..];
        let count_hex_digits = |prefix_length: usize| {
            rest[prefix_length..]
                .iter()
                .take_while(|c| c.is_ascii_hexdigit())
                .count()
        };
        let (prefix_length, digit_count) = match rest {
            ['0', 'x', first, ..] if *first != '0' && count_hex_digits(2) >= 5 => {
                (2, count_hex_digits(2))
            }
            _ if out.ends_with("id: ") && count_hex_digits(0) >= 5 => (0, count_hex_digits(0)),
            ['t', ..] if !previous_char.is_alphanumeric() && count_hex_digits(1) >= 5 => {
                (1, count_hex_digits(1))
            }
            _ => (0, 0),
        };
        if digit_count > 0 {
            out.push_str("TID");
            index += prefix_length + digit_count;
            continue;
        }
        let decimal_length = rest.iter().take_while(|c| c.is_ascii_digit()).count();
        if decimal_length > 0 && !previous_char.is_alphabetic() {
            let number: String = rest[..decimal_length].iter().collect();
            let fraction = if masks_all {
                fraction_length(&rest[decimal_length..])
            } else {
                0
            };
            let is_tid = number
                .parse::<u64>()
                .is_ok_and(|value| (TID_MIN..1 << 30).contains(&value));
            out.push_str(if masks_all {
                "N"
            } else if is_tid {
                "TID"
            } else {
                &number
            });
            index += decimal_length + fraction;
            continue;
        }
        out.push(chars[index]);
        index += 1;
    }
    out
}

/// Returns the length of the fraction and exponent that follow the integer digits of a number, such
/// as `.5` or `.5e-03`. `rest` is the text after these digits.
fn fraction_length(rest: &[char]) -> usize {
    let count_digits = |start: usize| {
        rest.get(start..)
            .unwrap_or(&[])
            .iter()
            .take_while(|c| c.is_ascii_digit())
            .count()
    };
    let fraction_end = if rest.first() == Some(&'.') {
        1 + count_digits(1)
    } else {
        0
    };
    match rest.get(fraction_end..) {
        Some(['e' | 'E', '+' | '-', ..]) => fraction_end + 2 + count_digits(fraction_end + 2),
        _ => fraction_end,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tids_are_masked_and_other_numbers_stay() {
        let line = "from t80001:  hello 0x40003 262146 tid: 4000a from h2, 700.5 of 0x2 time";
        assert_eq!(
            normalize_output(line, ComparedForm::OrderedLines),
            "from TID: hello TID TID tid: TID from h2, 700.5 of 0x2 time"
        );
    }

    #[test]
    fn shapes_have_no_numbers_but_names_keep_theirs() {
        assert_eq!(
            normalize_output(
                "  0:  1 bytes  77 times --> 1.5e-03 Mbps h2",
                ComparedForm::OrderedShapes
            ),
            "N: N bytes N times --> N Mbps h2"
        );
    }

    #[test]
    fn kinds_are_each_line_once_in_any_order() {
        assert_eq!(
            normalize_output("b 1\na 2\nb 3\n", ComparedForm::ShapeSet),
            "a N\nb N"
        );
    }
}
