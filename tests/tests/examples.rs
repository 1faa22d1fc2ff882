//! Debian's unmodified programs print the same output on three hosts of Sempa as on PVM 3.4.6.
//! PVM's examples, built from their sources with our headers and libraries, also print that output.

use anyhow::Result;
use sempa_tests::matrix::{
    CaseOutput, ComparedForm, ComparedVm, ProgramRun, System, normalize_output, run_on_systems,
    with_arguments, without_arguments,
};
use sempa_tests::requirements;
use sempa_tests::run::{RunningCommand, run_successfully, run_to_end};
use sempa_tests::screen::{self, BLACK, Picture, VirtualDisplay, WHITE};
use sempa_tests::timetable::{self, School};
use sempa_tests::wait_for;
use std::fs;
use std::ops::Range;
use std::process::{Command, Stdio};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(40);

/// A test case, as (name, form of the comparison, function that runs the case and returns its
/// output).
type Case<'a> = (
    &'a str,
    ComparedForm,
    Box<dyn Fn(&ComparedVm) -> Result<String> + Sync + 'a>,
);

/// Runs all cases on PVM and on Sempa, and compares the outputs. The cases run one after another on
/// the same virtual machine.
fn check_on_two_systems(cases: &[Case]) {
    let [pvm_outputs, sempa_outputs] =
        run_on_systems([System::Pvm, System::SempaDebianPrograms], |machine| {
            run_cases(machine, cases)
        });
    let report = differences(cases, &pvm_outputs, "ours", &sempa_outputs);
    assert!(report.is_empty(), "{report}");
}

/// As [`check_on_two_systems`], and also runs PVM's examples that are built from their sources on
/// Sempa.
fn check_on_three_systems(cases: &[Case]) {
    let systems = [
        System::Pvm,
        System::SempaDebianPrograms,
        System::SempaBuiltPrograms,
    ];
    let [pvm_outputs, sempa_outputs, built_outputs] =
        run_on_systems(systems, |machine| run_cases(machine, cases));
    let report = differences(cases, &pvm_outputs, "ours", &sempa_outputs)
        + &differences(cases, &pvm_outputs, "built", &built_outputs);
    assert!(report.is_empty(), "{report}");
}

fn run_cases(machine: &ComparedVm, cases: &[Case]) -> Result<Vec<CaseOutput>> {
    Ok(cases
        .iter()
        .map(|(_, _, run)| run(machine).map_err(|error| format!("{error:#}")))
        .collect())
}

/// Returns a description of the differences between the outputs of PVM and of another system; an
/// empty text if there are none.
fn differences(
    cases: &[Case],
    pvm_outputs: &[CaseOutput],
    other_name: &str,
    other_outputs: &[CaseOutput],
) -> String {
    let mut report = String::new();
    for (((name, comparison, _), pvm_outputs), other_outputs) in
        cases.iter().zip(pvm_outputs).zip(other_outputs)
    {
        if std::env::var_os("SEMPA_SHOW").is_some() {
            eprintln!("=== {name}\n{pvm_outputs:?}\n--- {other_name}\n{other_outputs:?}");
        }
        let normalize = |output: &CaseOutput| {
            output
                .as_ref()
                .map(|text| normalize_output(text, *comparison))
                .map_err(Clone::clone)
        };
        match (normalize(pvm_outputs), normalize(other_outputs)) {
            (Ok(pvm_outputs), Ok(other_outputs)) if pvm_outputs == other_outputs => {}
            (Ok(pvm_outputs), Ok(other_outputs)) => {
                let (pvm_only_lines, other_only_lines) = (
                    lines_only_in(&pvm_outputs, &other_outputs),
                    lines_only_in(&other_outputs, &pvm_outputs),
                );
                report += &format!(
                    "=== {name}\n--- only PVM's lines\n{pvm_only_lines}\n--- only {other_name}\n{other_only_lines}\n"
                );
                if pvm_only_lines.is_empty() && other_only_lines.is_empty() {
                    report += &format!(
                        "the order differs:\n--- PVM\n{pvm_outputs}\n--- {other_name}\n{other_outputs}\n"
                    );
                }
            }
            (pvm_outputs, other_outputs) => {
                let error_or_success = |output: CaseOutput| {
                    output.map_or_else(|error| error, |_| "it went well".to_string())
                };
                report += &format!(
                    "=== {name} failed\n--- PVM: {}\n--- {other_name}: {}\n",
                    error_or_success(pvm_outputs),
                    error_or_success(other_outputs)
                );
            }
        }
    }
    report
}

/// Returns the lines of `text` that `other_text` does not have. A line that occurs more often in
/// `text` than in `other_text` is returned once for each additional occurrence.
fn lines_only_in(text: &str, other_text: &str) -> String {
    let mut unmatched_lines: Vec<&str> = other_text.lines().collect();
    let missing_lines = text.lines().filter(|line| {
        match unmatched_lines
            .iter()
            .position(|candidate| candidate == line)
        {
            Some(index) => {
                unmatched_lines.swap_remove(index);
                false
            }
            None => true,
        }
    });
    missing_lines.collect::<Vec<_>>().join("\n")
}

fn case<'a>(
    name: &'a str,
    comparison: ComparedForm,
    run: impl Fn(&ComparedVm) -> Result<String> + Sync + 'a,
) -> Case<'a> {
    (name, comparison, Box::new(run))
}

fn plain_case<'a>(program_run: ProgramRun<'a>, comparison: ComparedForm) -> Case<'a> {
    case(program_run.program, comparison, move |machine| {
        machine.run_to_end(program_run)
    })
}

/// Returns a case whose output is compared without the lines for which `is_omitted` returns true.
fn case_without_lines<'a>(
    is_omitted: fn(&str) -> bool,
    program_run: ProgramRun<'a>,
    comparison: ComparedForm,
) -> Case<'a> {
    case(program_run.program, comparison, move |machine| {
        let text = machine.run_to_end(program_run)?;
        Ok(text
            .lines()
            .filter(|line| !is_omitted(line))
            .map(|line| format!("{line}\n"))
            .collect())
    })
}

/// True for those lines of Fortran's message about missing input that contain paths of the source
/// or of the program.
fn is_source_position(line: &str) -> bool {
    ["At line", "at ", "#"]
        .iter()
        .any(|prefix| line.trim().starts_with(prefix))
}

/// True for the line in which `frsg` prints a sum. The variable of the sum is not initialised, so
/// this line is also wrong on PVM unless the memory of the variable happens to be zero. Another
/// line of `frsg` shows that its group works.
fn is_frsg_sum(line: &str) -> bool {
    line.contains("Sum of Squares of")
}

fn case_with_input<'a>(program: &'a str, input: &'a str, comparison: ComparedForm) -> Case<'a> {
    plain_case(
        ProgramRun {
            input,
            ..without_arguments(program)
        },
        comparison,
    )
}

/// Returns a case that runs two copies of a program at the same time, on two hosts. The output of
/// the case is the output of both copies.
fn case_of_two_copies<'a>(program: &'a str, comparison: ComparedForm) -> Case<'a> {
    case(program, comparison, move |machine| {
        let first_copy = machine.start(without_arguments(program))?;
        let second_output = machine.run_to_end(ProgramRun {
            host_number: 2,
            ..without_arguments(program)
        })?;
        Ok(machine.result_text(&first_copy.wait_or_kill(TIMEOUT)?) + &second_output)
    })
}

/// Returns a case that starts a server, waits until `mailbox_name` is in the mailbox, and then runs
/// the programs `clients`. The output of the case is the output of all programs, the server's last.
fn case_with_server<'a>(
    server: ProgramRun<'a>,
    mailbox_name: &'a str,
    clients: &'a [ProgramRun<'a>],
    comparison: ComparedForm,
) -> Case<'a> {
    case(server.program, comparison, move |machine| {
        let running_server = machine.start(server)?;
        machine.wait_until_in_mailbox(mailbox_name)?;
        let mut outputs = String::new();
        for client in clients {
            outputs += &machine.run_to_end(*client)?;
        }
        Ok(outputs + &machine.result_text(&running_server.wait_or_kill(TIMEOUT)?))
    })
}

/// Returns a case that runs a worker without a master. The output of the case is what the worker
/// prints up to `last_text`, and whether the worker still waits.
fn case_of_waiting_worker<'a>(program: &'a str, last_text: &'a str) -> Case<'a> {
    case(program, ComparedForm::OrderedLines, move |machine| {
        let mut worker = machine.start(without_arguments(program))?;
        machine.wait_for_connection()?;
        let output = wait_for(TIMEOUT, || {
            let text =
                |worker: &RunningCommand| Ok(worker.stdout_so_far()? + &worker.stderr_so_far()?);
            let output = text(&worker).map_err(|error: anyhow::Error| format!("{error:#}"))?;
            if output.contains(last_text) {
                Ok(output)
            } else {
                Err(format!("no {last_text:?} in {output:?}"))
            }
        })?;
        let is_waiting = worker.poll_status()?.is_none();
        worker.kill_children_and_wait()?;
        Ok(format!("{output}\nwaits: {is_waiting}"))
    })
}

fn console_case<'a>(
    name: &'a str,
    commands: &'a str,
    end_text: &'a str,
    comparison: ComparedForm,
) -> Case<'a> {
    case(name, comparison, move |machine| {
        machine.run_console(commands, end_text)
    })
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn worker_examples_print_the_same_as_on_pvm() {
    check_on_three_systems(&[
        plain_case(without_arguments("hello.pvm"), ComparedForm::OrderedLines),
        plain_case(without_arguments("hello_other"), ComparedForm::OrderedLines),
        plain_case(without_arguments("master1"), ComparedForm::SortedLines),
        plain_case(without_arguments("fmaster1"), ComparedForm::SortedLines),
        plain_case(without_arguments("spmd"), ComparedForm::OrderedLines),
        plain_case(without_arguments("fspmd"), ComparedForm::OrderedLines),
        console_case(
            "spmd from the console",
            "spawn -4 -> spmd\n",
            "finished",
            ComparedForm::SortedLines,
        ),
        console_case(
            "fspmd from the console",
            "spawn -4 -> fspmd\n",
            "finished",
            ComparedForm::SortedLines,
        ),
        plain_case(without_arguments("hitc"), ComparedForm::ShapeSet),
        plain_case(without_arguments("timing"), ComparedForm::ShapeSet),
        case_of_waiting_worker("slave1", ""),
        case_of_waiting_worker("timing_slave", "Bad parameter"),
    ]);
}

/// Arguments of xdotool that press xep's quit button.
const CLICK_QUIT_ARGS: &str = "mousemove 19 46 click 1";
/// Arguments of xdotool that drag the mouse over xep's picture. The drag selects a rectangle of the
/// picture.
const DRAG_PART_ARGS: &str =
    "mousemove 65 128 mousedown 1 mousemove 100 150 mousemove 145 208 mouseup 1 click 2";
/// Lines of xep's picture on the screen, without its frame.
const PICTURE_LINES: Range<usize> = 70..268;
/// A column of the picture that has no white pixels when the whole set is drawn. A white pixel is
/// outside of the set, or no worker has drawn it yet.
const WHOLE_SET_COLUMN: usize = 106;
/// A column of the picture that has no white pixels when the selected part is drawn.
const PART_COLUMN: usize = 8;
/// Lines and columns on the screen that xep's text and its six buttons occupy. All of them are
/// black and white.
const LABEL_AREAS: [(Range<usize>, Range<usize>); 7] = [
    (8..24, 8..130),
    (36..58, 11..29),
    (36..58, 39..57),
    (36..58, 67..85),
    (36..58, 95..113),
    (36..58, 123..149),
    (36..58, 159..177),
];

/// Waits until xep has drawn all labels and the column `column` of its picture. Returns the
/// contents of the screen.
fn wait_until_drawn(screen: &VirtualDisplay, column: usize) -> Result<Picture> {
    wait_for(TIMEOUT, || {
        let picture = screen
            .dump_picture()
            .map_err(|error| format!("{error:#}"))?;
        let drawn_labels = LABEL_AREAS.iter().filter(|(lines, columns)| {
            let label = picture.pixels_in(lines.clone(), columns.clone());
            [BLACK, WHITE].iter().all(|colour| label.contains(colour))
        });
        let (drawn_labels, column_pixels) = (
            drawn_labels.count(),
            picture.pixels_in(PICTURE_LINES, column..column + 1),
        );
        let has_colour = column_pixels
            .iter()
            .any(|pixel| ![BLACK, WHITE].contains(pixel));
        let white_count = column_pixels
            .iter()
            .filter(|pixel| **pixel == WHITE)
            .count();
        if drawn_labels == LABEL_AREAS.len() && has_colour && white_count == 0 {
            return Ok(picture);
        }
        Err(format!(
            "not drawn: {drawn_labels} labels, coloured {has_colour}, white {white_count} of {}",
            column_pixels.len()
        ))
    })
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn xep_and_its_workers_draw_the_same_pictures() {
    requirements::panic_if_unmet(screen::unmet_requirement());
    check_on_two_systems(&[
        plain_case(without_arguments("xep"), ComparedForm::OrderedLines),
        case_of_waiting_worker("mtile", ""),
        case(
            "xep with a display",
            ComparedForm::OrderedLines,
            |machine| {
                let screen = VirtualDisplay::start(machine.testbed().host(1))?;
                let running_xep = machine.start_prepared(without_arguments("xep"), |command| {
                    command.env("DISPLAY", screen.display_name());
                })?;
                let whole_picture = wait_until_drawn(&screen, WHOLE_SET_COLUMN)?;
                screen.send_mouse_input(DRAG_PART_ARGS)?;
                let part_picture = wait_until_drawn(&screen, PART_COLUMN)?;
                let worker_count = machine
                    .run_console("ps -a\n", "mtile")?
                    .matches("mtile")
                    .count();
                screen.send_mouse_input(CLICK_QUIT_ARGS)?;
                let xep_output = machine.result_text(&running_xep.wait_or_kill(TIMEOUT)?);
                machine.run_console("ps -a\n", "COMMAND")?;
                screen.stop()?;
                // xep prints the descriptors of direct routes. Descriptor numbers are arbitrary, so
                // they are masked.
                let xep_output: String = xep_output
                    .lines()
                    .map(|line| format!("{}\n", mask_descriptors(line)))
                    .collect();
                Ok(format!(
                    "{}{}{worker_count} workers\n{xep_output}",
                    whole_picture.to_text(),
                    part_picture.to_text()
                ))
            },
        ),
    ]);
}

/// Returns `line` with `#` in place of each number after `fd` (a file descriptor) or `xii` (an
/// `XtInputId`, which is an address).
fn mask_descriptors(line: &str) -> String {
    let mut tokens = line.split(' ').peekable();
    let mut masked_tokens = Vec::new();
    while let Some(token) = tokens.next() {
        masked_tokens.push(token);
        if matches!(token, "fd" | "xii")
            && tokens
                .next_if(|next_token| next_token.parse::<u64>().is_ok())
                .is_some()
        {
            masked_tokens.push("#");
        }
    }
    masked_tokens.join(" ")
}

/// A small timetable problem that tablix2 solves within a second.
const SCHOOL: School = School {
    class_count: 5,
    teacher_count: 6,
    day_count: 5,
    lessons_per_day: 4,
    concurrent_lesson_count: 4,
};

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn tablix_finds_valid_timetables() {
    requirements::require_program("/usr/bin/tablix2", "tablix2");
    check_on_two_systems(&[case("tablix2", ComparedForm::ShapeSet, |machine| {
        let folder = machine.testbed().root_home().join("timetable");
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("school.xml"), timetable::problem_xml(SCHOOL, 1))?;
        let file_path = |name: &str| folder.join(name).display().to_string();
        let (prefix, problem) = (file_path("out_"), file_path("school.xml"));
        let args = [
            "-n",
            "6",
            "-d",
            "3",
            "-p",
            "finish=30",
            "-o",
            &prefix,
            &problem,
        ];
        let tablix_output = machine.run_to_end(with_arguments("tablix2", &args))?;
        // The number, order and speed of the kernels' reports are random.
        let is_random_line = |line: &&str| {
            [" reports ", "] kernel: ", "\t", "per minute"]
                .iter()
                .any(|fragment| line.contains(fragment))
        };
        let tablix_output = tablix_output
            .split(['\n', '\r'])
            .filter(|line| !is_random_line(line));
        let mut comparable_output: String = tablix_output.map(|line| format!("{line}\n")).collect();
        for number in 0..6 {
            let csv_path = file_path(&format!("{number}.csv"));
            let mut converter =
                machine.command(machine.testbed().host(1), "/usr/bin/tablix2_output");
            converter.args([
                "-o",
                &csv_path,
                "csv",
                &file_path(&format!("out_result{number}.xml")),
            ]);
            run_successfully(converter, TIMEOUT)?;
            // Fails if the timetable violates a hard constraint.
            let solution = timetable::check_solution(&fs::read_to_string(&csv_path)?)?;
            comparable_output += &format!(
                "a valid table of {} lessons\n",
                if solution.lesson_count == 80 {
                    "all"
                } else {
                    "not all"
                }
            );
        }
        Ok(comparable_output)
    })]);
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn group_examples_print_the_same_as_on_pvm() {
    check_on_three_systems(&[
        case_with_input("gexample", "10 4\n", ComparedForm::SortedLines),
        console_case(
            "gexample from the console",
            "spawn -3 -> gexample\n",
            "finished",
            ComparedForm::ShapeSet,
        ),
        // The last digits of the results of `fgexample` depend on the order of multiplications.
        plain_case(without_arguments("fgexample"), ComparedForm::ShapeSet),
        case_without_lines(
            is_frsg_sum,
            ProgramRun {
                input: "8\n4\n",
                ..without_arguments("frsg")
            },
            ComparedForm::SortedLines,
        ),
        case_without_lines(
            is_source_position,
            ProgramRun {
                input: "8 4\n",
                ..without_arguments("frsg")
            },
            ComparedForm::SortedLines,
        ),
        case_without_lines(
            is_source_position,
            without_arguments("frsg"),
            ComparedForm::SortedLines,
        ),
        case_with_input("trsg", "8 4\n", ComparedForm::SortedLines),
        // A member may request the instance numbers of other members before all have joined.
        case_without_lines(
            |line| line.contains("doesn't match up"),
            with_arguments("ge", &["4"]),
            ComparedForm::ShapeSet,
        ),
        plain_case(without_arguments("ge"), ComparedForm::OrderedLines),
        plain_case(with_arguments("gexamp", &["4"]), ComparedForm::ShapeSet),
        // `gs.pvm` prints "waiting on kids" only if the children are slower than their parent.
        case_without_lines(
            |line| line.contains("waiting on kids"),
            with_arguments("gs.pvm", &["4"]),
            ComparedForm::ShapeSet,
        ),
        plain_case(without_arguments("gs.pvm"), ComparedForm::OrderedLines),
        plain_case(
            with_arguments("joinleave", &["200"]),
            ComparedForm::OrderedLines,
        ),
        plain_case(with_arguments("thb", &["3"]), ComparedForm::ShapeSet),
        // `tjf` reads one name beyond the end of its table of names.
        case_without_lines(
            |line| matches!(line.trim(), "joined" | "joined group32"),
            without_arguments("tjf"),
            ComparedForm::OrderedLines,
        ),
        plain_case(without_arguments("tjl"), ComparedForm::OrderedLines),
        plain_case(without_arguments("tst"), ComparedForm::OrderedLines),
        plain_case(without_arguments("pvm_gstat"), ComparedForm::OrderedLines),
        case(
            "pvm_gstat of a group",
            ComparedForm::OrderedLines,
            |machine| {
                let first_member = machine.start(without_arguments("dbwtest"))?;
                let gstat_output = wait_for(TIMEOUT, || {
                    match machine.run_to_end(without_arguments("pvm_gstat")) {
                        Ok(out) if out.contains("size: 1,") => Ok(out),
                        other => Err(format!("no group with one member: {other:?}")),
                    }
                })?;
                machine.run_to_end(without_arguments("dbwtest"))?;
                first_member.wait_or_kill(TIMEOUT)?;
                Ok(gstat_output)
            },
        ),
        // PVM's group server prints the dump to the log; our library prints it to standard output.
        case_without_lines(
            |line| line.contains("DUMP"),
            without_arguments("pvmgroups"),
            ComparedForm::OrderedLines,
        ),
    ]);
}

/// Path of Debian's group library, which programs on Sempa do not use by default.
const GROUP_LIBRARY: &str = "/usr/lib/x86_64-linux-gnu/libgpvm3.so.3";

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn calls_of_pvms_own_group_library_are_traced() {
    check_on_two_systems(&[case("tst traced", ComparedForm::ShapeSet, |machine| {
        let host = machine.testbed().host(1);
        let record_file = machine.testbed().root_home().join("records");
        let record_path = record_file.display().to_string();
        let mut tracer = machine.command(host, "/usr/bin/tracer");
        tracer.args(["-T", &record_path]);
        let mut tracer = RunningCommand::start(tracer, Stdio::piped())?;
        // The tracer exits at the end of its input, so the test keeps the input open.
        let input = tracer.take_stdin();
        machine.wait_for_connection()?;
        let mut task = machine.command(host, "/usr/bin/env");
        task.arg(format!("LD_PRELOAD={GROUP_LIBRARY}"))
            .arg("/usr/bin/tst");
        let task_output = run_to_end(task, TIMEOUT)?;
        let records = wait_for(TIMEOUT, || match fs::read_to_string(&record_file) {
            Ok(text) if text.contains("\"lvgroup(1.1)\" {") => Ok(text),
            other => Err(format!("no record of leaving a group: {other:?}")),
        })?;
        drop(input);
        tracer.wait_or_kill(TIMEOUT)?;
        // Only the records of group calls are compared: the two systems announce the items of
        // records in different forms, and our daemons trace more calls than PVM's.
        let group_records = records
            .lines()
            .filter(|line| line.starts_with('"') && line.contains("group("));
        Ok(machine.result_text(&task_output)
            + &group_records
                .map(|line| format!("{line}\n"))
                .collect::<String>())
    })]);
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn measuring_examples_print_the_same_as_on_pvm() {
    check_on_three_systems(&[
        case_of_two_copies("dbwtest", ComparedForm::ShapeSet),
        case_of_two_copies("ibwtest", ComparedForm::ShapeSet),
        case_of_two_copies("rbwtest", ComparedForm::ShapeSet),
        case_of_two_copies("pbwtest", ComparedForm::ShapeSet),
    ]);
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn mailbox_and_context_examples_print_the_same_as_on_pvm() {
    check_on_three_systems(&[
        plain_case(
            with_arguments("lmbi", &["1", "d", "e"]),
            ComparedForm::OrderedLines,
        ),
        plain_case(
            with_arguments("lmbi", &["2", "p", "e"]),
            ComparedForm::OrderedLines,
        ),
        plain_case(
            with_arguments("lmbi", &["3", "pm", "e"]),
            ComparedForm::OrderedLines,
        ),
        plain_case(
            with_arguments("lmbi", &["1", "o", "e"]),
            ComparedForm::OrderedLines,
        ),
        plain_case(without_arguments("lmbi"), ComparedForm::OrderedLines),
        plain_case(without_arguments("gmbi"), ComparedForm::OrderedLines),
        plain_case(
            with_arguments("gmbi", &["entry"]),
            ComparedForm::OrderedLines,
        ),
        plain_case(
            with_arguments("task1", &["svc", "0", "d"]),
            ComparedForm::OrderedLines,
        ),
        case_with_server(
            with_arguments("task0", &["svc", "d"]),
            "svc",
            &[
                ProgramRun {
                    host_number: 2,
                    ..with_arguments("task1", &["svc", "0", "d"])
                },
                with_arguments("rme", &["svc", "0"]),
                with_arguments("task1", &["svc", "0", "d"]),
                with_arguments("task_end", &["svc", "0"]),
            ],
            ComparedForm::OrderedLines,
        ),
        plain_case(
            with_arguments("rme", &["svc", "0"]),
            ComparedForm::OrderedLines,
        ),
        plain_case(without_arguments("task0"), ComparedForm::OrderedLines),
        plain_case(without_arguments("task1"), ComparedForm::OrderedLines),
        plain_case(without_arguments("task_end"), ComparedForm::OrderedLines),
        plain_case(
            with_arguments("inherita", &["inherit1"]),
            ComparedForm::SortedLines,
        ),
        plain_case(
            with_arguments("inherita", &["inherit3"]),
            ComparedForm::SortedLines,
        ),
        plain_case(without_arguments("inheritb"), ComparedForm::SortedLines),
        plain_case(without_arguments("inherit1"), ComparedForm::OrderedLines),
        plain_case(without_arguments("inherit2"), ComparedForm::OrderedLines),
        plain_case(without_arguments("inherit3"), ComparedForm::OrderedLines),
    ]);
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn message_handler_examples_print_the_same_as_on_pvm() {
    check_on_three_systems(&[
        plain_case(without_arguments("mhf_tickle"), ComparedForm::OrderedLines),
        case_with_server(
            without_arguments("mhf_server"),
            "mhf_server",
            &[ProgramRun {
                input: "0\n1\n1\n1\n6\n0\n4\n1\n4\n6\n2\n9\n3\n9\n",
                ..without_arguments("mhf_tickle")
            }],
            ComparedForm::OrderedLines,
        ),
    ]);
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn programs_of_other_packages_print_the_same_as_on_pvm() {
    requirements::require_program("/usr/bin/NPpvm", "netpipe-pvm");
    requirements::require_program("/usr/bin/slsh", "slang-pvm and slsh");
    check_on_two_systems(&[
        case("NPpvm", ComparedForm::ShapeSet, |machine| {
            let receiver = machine.start(with_arguments("NPpvm", &["-u", "500", "-n", "20"]))?;
            machine.wait_for_connection()?;
            let sender_output = machine.run_to_end(ProgramRun {
                host_number: 2,
                ..with_arguments("NPpvm", &["-h", "h1", "-u", "500", "-n", "20"])
            })?;
            Ok(machine.result_text(&receiver.wait_or_kill(TIMEOUT)?) + &sender_output)
        }),
        case("slsh", ComparedForm::OrderedLines, |machine| {
            let set_exported_host = |command: &mut Command| {
                command.env("HOST", "somewhere").env("PVM_EXPORT", "HOST");
            };
            let slsh_output = machine
                .start_prepared(with_arguments("slsh", &["hello_master"]), set_exported_host)?
                .wait_or_kill(TIMEOUT)?;
            Ok(machine.result_text(&slsh_output))
        }),
        // The `master` script exits as soon as its slave reports the end of its work. Output of the
        // slave that arrives later is lost.
        case_without_lines(
            |line| line == "hi",
            with_arguments("slsh", &["master", "echo hi", "2"]),
            ComparedForm::SortedLines,
        ),
        plain_case(without_arguments("pvmgetarch"), ComparedForm::OrderedLines),
        plain_case(without_arguments("tracer"), ComparedForm::OrderedLines),
        case_with_input("tracer", "trace\nhelp\nquit\n", ComparedForm::OrderedLines),
        plain_case(
            with_arguments("trcsort", &["no-such-file"]),
            ComparedForm::OrderedLines,
        ),
    ]);
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn debians_resource_manager_works_as_on_pvm() {
    check_on_two_systems(&[case("srm.pvm", ComparedForm::OrderedLines, |machine| {
        // PVM's daemons use a resource manager only if it was registered before they started.
        machine.run_console("delete h2 h3\n", "deleted")?;
        machine.wait_until_console_shows("conf\n", "1 host,")?;
        let mut manager = machine.start(without_arguments("srm.pvm"))?;
        machine.wait_until_printed(&manager, "registered as Resource Manager")?;
        let console_output = machine.run_to_end(without_arguments("hello.pvm"))?
            + &machine.run_console("conf\nspawn -1 nosuchprogram\n", "No such")?;
        let is_alive = manager.poll_status()?.is_none();
        manager.kill_children_and_wait()?;
        Ok(format!(
            "{console_output}the manager is {}",
            if is_alive { "alive" } else { "gone" }
        ))
    })]);
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn debians_console_prints_the_same_as_on_pvm() {
    check_on_two_systems(&[
        console_case(
            "a job",
            "spawn -3 -> /bin/hostname\n",
            "finished",
            ComparedForm::SortedLines,
        ),
        console_case("conf", "conf\n", "h3", ComparedForm::OrderedLines),
        console_case(
            "a session",
            "version\nid\nconf\nmstat h2 nohost\npstat t99999\nadd nohost\nalias\n\
             spawn -2 -h2 nosuchprogram\nspawn\nfoo\ngetopt\nsetopt route 1\nsetopt foo 1\nputs\nnames\n\
             export PATH\nexport\nunexport PATH\necho a  b\nhelp conf\nps -a\njobs\ntrace\ndelete h3\necho done\n",
            "done\n",
            ComparedForm::OrderedLines,
        ),
    ]);
}
