//! Debian's unmodified programs print the same output on three hosts of Sempa as on PVM 3.4.6. So
//! do PVM's examples that are built from their sources with our headers and libraries.

use anyhow::Result;
use sempa_tests::matrix::{
    CaseOutput, ComparedVm, Comparison, ProgramRun, System, normalize, run_on_systems,
    with_arguments, without_arguments,
};
use sempa_tests::requirements;
use sempa_tests::run::{RunningCommand, run, run_ok};
use sempa_tests::screen::{self, BLACK, Picture, Screen, WHITE};
use sempa_tests::timetable::{self, School};
use sempa_tests::wait_for;
use std::fs;
use std::ops::Range;
use std::process::{Command, Stdio};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(40);

/// A test case, as (name, form of the comparison, function that runs it).
type Case<'a> = (
    &'a str,
    Comparison,
    Box<dyn Fn(&ComparedVm) -> Result<String> + Sync + 'a>,
);

/// Runs all cases on PVM and on Sempa, and compares the outputs. The cases run one after another on
/// the same virtual machine.
fn check_on_two_systems(cases: &[Case]) {
    let [real, ours] = run_on_systems([System::Pvm, System::SempaDebianPrograms], |machine| {
        run_cases(machine, cases)
    });
    let wrong = differences(cases, &real, "ours", &ours);
    assert!(wrong.is_empty(), "{wrong}");
}

/// As [`check_on_two_systems`]; also runs the programs that are built from their sources.
fn check_on_three_systems(cases: &[Case]) {
    let systems = [
        System::Pvm,
        System::SempaDebianPrograms,
        System::SempaBuiltPrograms,
    ];
    let [real, ours, built] = run_on_systems(systems, |machine| run_cases(machine, cases));
    let wrong =
        differences(cases, &real, "ours", &ours) + &differences(cases, &real, "built", &built);
    assert!(wrong.is_empty(), "{wrong}");
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
    real: &[CaseOutput],
    name_of_other: &str,
    other: &[CaseOutput],
) -> String {
    let mut wrong = String::new();
    for (((name, how, _), real), other) in cases.iter().zip(real).zip(other) {
        if std::env::var_os("SEMPA_SHOW").is_some() {
            eprintln!("=== {name}\n{real:?}\n--- {name_of_other}\n{other:?}");
        }
        let compared = |heard: &CaseOutput| {
            heard
                .as_ref()
                .map(|text| normalize(text, *how))
                .map_err(Clone::clone)
        };
        match (compared(real), compared(other)) {
            (Ok(real), Ok(other)) if real == other => {}
            (Ok(real), Ok(other)) => {
                let (only_real, only_other) =
                    (lines_only_in(&real, &other), lines_only_in(&other, &real));
                wrong += &format!(
                    "=== {name}\n--- only PVM's lines\n{only_real}\n--- only {name_of_other}\n{only_other}\n"
                );
                if only_real.is_empty() && only_other.is_empty() {
                    wrong += &format!(
                        "the order differs:\n--- PVM\n{real}\n--- {name_of_other}\n{other}\n"
                    );
                }
            }
            (real, other) => {
                let shown = |heard: CaseOutput| {
                    heard.map_or_else(|error| error, |_| "it went well".to_string())
                };
                wrong += &format!(
                    "=== {name} failed\n--- PVM: {}\n--- {name_of_other}: {}\n",
                    shown(real),
                    shown(other)
                );
            }
        }
    }
    wrong
}

/// Returns the lines of `text` that `other` does not have. A repeated line counts as often as it
/// occurs.
fn lines_only_in(text: &str, other: &str) -> String {
    let mut rest: Vec<&str> = other.lines().collect();
    let missing = text
        .lines()
        .filter(|line| match rest.iter().position(|one| one == line) {
            Some(at) => {
                rest.swap_remove(at);
                false
            }
            None => true,
        });
    missing.collect::<Vec<_>>().join("\n")
}

fn case<'a>(
    name: &'a str,
    how: Comparison,
    run: impl Fn(&ComparedVm) -> Result<String> + Sync + 'a,
) -> Case<'a> {
    (name, how, Box::new(run))
}

fn plain_case<'a>(shell: ProgramRun<'a>, how: Comparison) -> Case<'a> {
    case(shell.program, how, move |machine| machine.run(shell))
}

/// Returns a case whose output is compared without the lines for which `left_out` returns true.
fn case_without_lines<'a>(
    left_out: fn(&str) -> bool,
    shell: ProgramRun<'a>,
    how: Comparison,
) -> Case<'a> {
    case(shell.program, how, move |machine| {
        let text = machine.run(shell)?;
        Ok(text
            .lines()
            .filter(|line| !left_out(line))
            .map(|line| format!("{line}\n"))
            .collect())
    })
}

/// True for lines of Fortran's message about a missing number that depend on the paths of source
/// and code.
fn is_source_position(line: &str) -> bool {
    ["At line", "at ", "#"]
        .iter()
        .any(|start| line.trim().starts_with(start))
}

/// True for the line in which `frsg` prints a sum. The variable of the sum is not initialised, so
/// the line is wrong on PVM, too, unless the stack happens to be zero. Another line of `frsg` shows
/// that its group works.
fn is_frsg_sum(line: &str) -> bool {
    line.contains("Sum of Squares of")
}

fn case_with_input<'a>(program: &'a str, input: &'a str, how: Comparison) -> Case<'a> {
    plain_case(
        ProgramRun {
            input,
            ..without_arguments(program)
        },
        how,
    )
}

/// Returns a case that runs two copies of a program, on two hosts at the same time. Its output is
/// that of both.
fn case_of_two_copies<'a>(program: &'a str, how: Comparison) -> Case<'a> {
    case(program, how, move |machine| {
        let first = machine.start(without_arguments(program))?;
        let second = machine.run(ProgramRun {
            host: 2,
            ..without_arguments(program)
        })?;
        Ok(machine.text(&first.finish(TIMEOUT)?) + &second)
    })
}

/// Returns a case that runs a server and, when `name` is in the mailbox, the programs `others`. Its
/// output is that of all programs, the server's last.
fn case_with_server<'a>(
    server: ProgramRun<'a>,
    name: &'a str,
    others: &'a [ProgramRun<'a>],
    how: Comparison,
) -> Case<'a> {
    case(server.program, how, move |machine| {
        let running = machine.start(server)?;
        machine.wait_until_in_mailbox(name)?;
        let mut all = String::new();
        for other in others {
            all += &machine.run(*other)?;
        }
        Ok(all + &machine.text(&running.finish(TIMEOUT)?))
    })
}

/// Returns a case that runs a worker without a master. Its output is what the worker prints until
/// `last_words`, which appear some time after it has connected.
fn case_of_waiting_worker<'a>(program: &'a str, last_words: &'a str) -> Case<'a> {
    case(program, Comparison::Lines, move |machine| {
        let mut slave = machine.start(without_arguments(program))?;
        machine.wait_for_connection()?;
        let out = wait_for(TIMEOUT, || {
            let text = |slave: &RunningCommand| Ok(slave.out_so_far()? + &slave.err_so_far()?);
            let out = text(&slave).map_err(|error: anyhow::Error| format!("{error:#}"))?;
            if out.contains(last_words) {
                Ok(out)
            } else {
                Err(format!("no {last_words:?} in {out:?}"))
            }
        })?;
        let waits = slave.poll()?.is_none();
        slave.end_inside()?;
        Ok(format!("{out}\nwaits: {waits}"))
    })
}

fn console_case<'a>(name: &'a str, commands: &'a str, until: &'a str, how: Comparison) -> Case<'a> {
    case(name, how, move |machine| machine.console(commands, until))
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn examples_with_workers() {
    check_on_three_systems(&[
        plain_case(without_arguments("hello.pvm"), Comparison::Lines),
        plain_case(without_arguments("hello_other"), Comparison::Lines),
        plain_case(without_arguments("master1"), Comparison::Sorted),
        plain_case(without_arguments("fmaster1"), Comparison::Sorted),
        plain_case(without_arguments("spmd"), Comparison::Lines),
        plain_case(without_arguments("fspmd"), Comparison::Lines),
        console_case(
            "spmd from the console",
            "spawn -4 -> spmd\n",
            "finished",
            Comparison::Sorted,
        ),
        console_case(
            "fspmd from the console",
            "spawn -4 -> fspmd\n",
            "finished",
            Comparison::Sorted,
        ),
        plain_case(without_arguments("hitc"), Comparison::Kinds),
        plain_case(without_arguments("timing"), Comparison::Kinds),
        case_of_waiting_worker("slave1", ""),
        case_of_waiting_worker("timing_slave", "Bad parameter"),
    ]);
}

/// Arguments of xdotool that press xep's button for the end.
const CLICK_QUIT: &str = "mousemove 19 46 click 1";
/// Arguments of xdotool that drag the mouse over xep's picture, which selects a part of it.
const DRAG_PART: &str =
    "mousemove 65 128 mousedown 1 mousemove 100 150 mousemove 145 208 mouseup 1 click 2";
/// Lines of xep's picture on the screen, without its frame.
const PICTURE_LINES: Range<usize> = 70..268;
/// A column of the picture that has no white pixels when the whole set is drawn. White pixels are
/// outside of the set, or not yet drawn by a worker.
const WHOLE_SET_COLUMN: usize = 106;
/// A column of the picture that has no white pixels when the selected part is drawn.
const PART_COLUMN: usize = 8;
/// Lines and columns on the screen of xep's text and of its six buttons, which are black and white.
const LABELS: [(Range<usize>, Range<usize>); 7] = [
    (8..24, 8..130),
    (36..58, 11..29),
    (36..58, 39..57),
    (36..58, 67..85),
    (36..58, 95..113),
    (36..58, 123..149),
    (36..58, 159..177),
];

/// Waits until xep has drawn all labels and its picture is complete in the column `column`.
fn wait_until_drawn(screen: &Screen, column: usize) -> Result<Picture> {
    wait_for(TIMEOUT, || {
        let picture = screen.picture().map_err(|error| format!("{error:#}"))?;
        let labelled = LABELS.iter().filter(|(lines, columns)| {
            let label = picture.pixels_in(lines.clone(), columns.clone());
            [BLACK, WHITE].iter().all(|colour| label.contains(colour))
        });
        let (labelled, down) = (
            labelled.count(),
            picture.pixels_in(PICTURE_LINES, column..column + 1),
        );
        let coloured = down.iter().any(|pixel| ![BLACK, WHITE].contains(pixel));
        let white = down.iter().filter(|pixel| **pixel == WHITE).count();
        if labelled == LABELS.len() && coloured && white == 0 {
            return Ok(picture);
        }
        Err(format!(
            "not drawn: {labelled} labels, coloured {coloured}, white {white} of {}",
            down.len()
        ))
    })
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn xep_and_its_workers_draw_the_same_pictures() {
    requirements::require(screen::lacks());
    check_on_two_systems(&[
        plain_case(without_arguments("xep"), Comparison::Lines),
        case_of_waiting_worker("mtile", ""),
        case("xep with a display", Comparison::Lines, |machine| {
            let screen = Screen::start(machine.bed().host(1))?;
            let running = machine.start_with(without_arguments("xep"), |command| {
                command.env("DISPLAY", screen.name());
            })?;
            let whole = wait_until_drawn(&screen, WHOLE_SET_COLUMN)?;
            screen.mouse(DRAG_PART)?;
            let part = wait_until_drawn(&screen, PART_COLUMN)?;
            let workers = machine
                .console("ps -a\n", "mtile")?
                .matches("mtile")
                .count();
            screen.mouse(CLICK_QUIT)?;
            let said = machine.text(&running.finish(TIMEOUT)?);
            machine.console("ps -a\n", "COMMAND")?;
            screen.end()?;
            // xep prints the descriptors of direct routes. Their numbers are arbitrary.
            let said: String = said
                .lines()
                .map(|line| format!("{}\n", without_descriptors(line)))
                .collect();
            Ok(format!(
                "{}{}{workers} workers\n{said}",
                whole.text(),
                part.text()
            ))
        }),
    ]);
}

/// Returns a line in which the numbers of descriptors and the addresses of X's toolkit are masked.
fn without_descriptors(line: &str) -> String {
    let mut words = line.split(' ').peekable();
    let mut kept = Vec::new();
    while let Some(word) = words.next() {
        kept.push(word);
        if matches!(word, "fd" | "xii")
            && words.next_if(|next| next.parse::<u64>().is_ok()).is_some()
        {
            kept.push("#");
        }
    }
    kept.join(" ")
}

/// A small timetable problem, which is solved within a second.
const SCHOOL: School = School {
    classes: 5,
    teachers: 6,
    days: 5,
    lessons_per_day: 4,
    concurrent_lessons: 4,
};

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn tablix_finds_valid_timetables() {
    requirements::require_program("/usr/bin/tablix2", "tablix2");
    check_on_two_systems(&[case("tablix2", Comparison::Kinds, |machine| {
        let folder = machine.bed().home().join("timetable");
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("school.xml"), timetable::problem(SCHOOL, 1))?;
        let place = |name: &str| folder.join(name).display().to_string();
        let (prefix, problem) = (place("out_"), place("school.xml"));
        let words = [
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
        let said = machine.run(with_arguments("tablix2", &words))?;
        // The number, order and speed of the kernels' reports are random.
        let chance = |line: &&str| {
            [" reports ", "] kernel: ", "\t", "per minute"]
                .iter()
                .any(|part| line.contains(part))
        };
        let said = said.split(['\n', '\r']).filter(|line| !chance(line));
        let mut all: String = said.map(|line| format!("{line}\n")).collect();
        for number in 0..6 {
            let table = place(&format!("{number}.csv"));
            let mut output = machine.command(machine.bed().host(1), "/usr/bin/tablix2_output");
            output.args([
                "-o",
                &table,
                "csv",
                &place(&format!("out_result{number}.xml")),
            ]);
            run_ok(output, TIMEOUT)?;
            // The check fails if a hard constraint is violated.
            let solution = timetable::check_solution(&fs::read_to_string(&table)?)?;
            all += &format!(
                "a valid table of {} lessons\n",
                if solution.lessons == 80 {
                    "all"
                } else {
                    "not all"
                }
            );
        }
        Ok(all)
    })]);
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn examples_with_groups() {
    check_on_three_systems(&[
        case_with_input("gexample", "10 4\n", Comparison::Sorted),
        console_case(
            "gexample from the console",
            "spawn -3 -> gexample\n",
            "finished",
            Comparison::Kinds,
        ),
        // The last digits of its results depend on the order of multiplications.
        plain_case(without_arguments("fgexample"), Comparison::Kinds),
        case_without_lines(
            is_frsg_sum,
            ProgramRun {
                input: "8\n4\n",
                ..without_arguments("frsg")
            },
            Comparison::Sorted,
        ),
        case_without_lines(
            is_source_position,
            ProgramRun {
                input: "8 4\n",
                ..without_arguments("frsg")
            },
            Comparison::Sorted,
        ),
        case_without_lines(
            is_source_position,
            without_arguments("frsg"),
            Comparison::Sorted,
        ),
        case_with_input("trsg", "8 4\n", Comparison::Sorted),
        // A member may request the numbers of other members before all have joined.
        case_without_lines(
            |line| line.contains("doesn't match up"),
            with_arguments("ge", &["4"]),
            Comparison::Kinds,
        ),
        plain_case(without_arguments("ge"), Comparison::Lines),
        plain_case(with_arguments("gexamp", &["4"]), Comparison::Kinds),
        // The line appears only if the children are slower than their parent.
        case_without_lines(
            |line| line.contains("waiting on kids"),
            with_arguments("gs.pvm", &["4"]),
            Comparison::Kinds,
        ),
        plain_case(without_arguments("gs.pvm"), Comparison::Lines),
        plain_case(with_arguments("joinleave", &["200"]), Comparison::Lines),
        plain_case(with_arguments("thb", &["3"]), Comparison::Kinds),
        // The program reads one name beyond the end of its table.
        case_without_lines(
            |line| matches!(line.trim(), "joined" | "joined group32"),
            without_arguments("tjf"),
            Comparison::Lines,
        ),
        plain_case(without_arguments("tjl"), Comparison::Lines),
        plain_case(without_arguments("tst"), Comparison::Lines),
        plain_case(without_arguments("pvm_gstat"), Comparison::Lines),
        case("pvm_gstat of a group", Comparison::Lines, |machine| {
            let first = machine.start(without_arguments("dbwtest"))?;
            let shown = wait_for(TIMEOUT, || {
                match machine.run(without_arguments("pvm_gstat")) {
                    Ok(out) if out.contains("size: 1,") => Ok(out),
                    other => Err(format!("no group with one member: {other:?}")),
                }
            })?;
            machine.run(without_arguments("dbwtest"))?;
            first.finish(TIMEOUT)?;
            Ok(shown)
        }),
        // PVM's server prints the dump to the log, our library to standard output.
        case_without_lines(
            |line| line.contains("DUMP"),
            without_arguments("pvmgroups"),
            Comparison::Lines,
        ),
    ]);
}

/// Path of Debian's group library, which programs on Sempa do not use by default.
const GROUP_LIBRARY: &str = "/usr/lib/x86_64-linux-gnu/libgpvm3.so.3";

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn calls_of_pvms_own_group_library_are_traced() {
    check_on_two_systems(&[case("tst traced", Comparison::Kinds, |machine| {
        let host = machine.bed().host(1);
        let file = machine.bed().home().join("records");
        let place = file.display().to_string();
        let mut tracer = machine.command(host, "/usr/bin/tracer");
        tracer.args(["-T", &place]);
        let mut tracer = RunningCommand::start(tracer, Stdio::piped())?;
        // The tracer ends at the end of its input, so the input stays open.
        let input = tracer.take_stdin();
        machine.wait_for_connection()?;
        let mut task = machine.command(host, "/usr/bin/env");
        task.arg(format!("LD_PRELOAD={GROUP_LIBRARY}"))
            .arg("/usr/bin/tst");
        let done = run(task, TIMEOUT)?;
        let records = wait_for(TIMEOUT, || match fs::read_to_string(&file) {
            Ok(text) if text.contains("\"lvgroup(1.1)\" {") => Ok(text),
            other => Err(format!("no record of leaving a group: {other:?}")),
        })?;
        drop(input);
        tracer.finish(TIMEOUT)?;
        // Only the records of group calls are compared: the two systems announce the items of
        // records in different forms, and our daemons trace more calls.
        let of_groups = records
            .lines()
            .filter(|line| line.starts_with('"') && line.contains("group("));
        Ok(machine.text(&done)
            + &of_groups
                .map(|line| format!("{line}\n"))
                .collect::<String>())
    })]);
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn examples_that_measure() {
    check_on_three_systems(&[
        case_of_two_copies("dbwtest", Comparison::Kinds),
        case_of_two_copies("ibwtest", Comparison::Kinds),
        case_of_two_copies("rbwtest", Comparison::Kinds),
        case_of_two_copies("pbwtest", Comparison::Kinds),
    ]);
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn examples_of_mailbox_and_contexts() {
    check_on_three_systems(&[
        plain_case(with_arguments("lmbi", &["1", "d", "e"]), Comparison::Lines),
        plain_case(with_arguments("lmbi", &["2", "p", "e"]), Comparison::Lines),
        plain_case(with_arguments("lmbi", &["3", "pm", "e"]), Comparison::Lines),
        plain_case(with_arguments("lmbi", &["1", "o", "e"]), Comparison::Lines),
        plain_case(without_arguments("lmbi"), Comparison::Lines),
        plain_case(without_arguments("gmbi"), Comparison::Lines),
        plain_case(with_arguments("gmbi", &["entry"]), Comparison::Lines),
        plain_case(
            with_arguments("task1", &["svc", "0", "d"]),
            Comparison::Lines,
        ),
        case_with_server(
            with_arguments("task0", &["svc", "d"]),
            "svc",
            &[
                ProgramRun {
                    host: 2,
                    ..with_arguments("task1", &["svc", "0", "d"])
                },
                with_arguments("rme", &["svc", "0"]),
                with_arguments("task1", &["svc", "0", "d"]),
                with_arguments("task_end", &["svc", "0"]),
            ],
            Comparison::Lines,
        ),
        plain_case(with_arguments("rme", &["svc", "0"]), Comparison::Lines),
        plain_case(without_arguments("task0"), Comparison::Lines),
        plain_case(without_arguments("task1"), Comparison::Lines),
        plain_case(without_arguments("task_end"), Comparison::Lines),
        plain_case(
            with_arguments("inherita", &["inherit1"]),
            Comparison::Sorted,
        ),
        plain_case(
            with_arguments("inherita", &["inherit3"]),
            Comparison::Sorted,
        ),
        plain_case(without_arguments("inheritb"), Comparison::Sorted),
        plain_case(without_arguments("inherit1"), Comparison::Lines),
        plain_case(without_arguments("inherit2"), Comparison::Lines),
        plain_case(without_arguments("inherit3"), Comparison::Lines),
    ]);
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn examples_of_message_handlers() {
    check_on_three_systems(&[
        plain_case(without_arguments("mhf_tickle"), Comparison::Lines),
        case_with_server(
            without_arguments("mhf_server"),
            "mhf_server",
            &[ProgramRun {
                input: "0\n1\n1\n1\n6\n0\n4\n1\n4\n6\n2\n9\n3\n9\n",
                ..without_arguments("mhf_tickle")
            }],
            Comparison::Lines,
        ),
    ]);
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn programs_of_other_packages() {
    requirements::require_program("/usr/bin/NPpvm", "netpipe-pvm");
    requirements::require_program("/usr/bin/slsh", "slang-pvm and slsh");
    check_on_two_systems(&[
        case("NPpvm", Comparison::Kinds, |machine| {
            let receiver = machine.start(with_arguments("NPpvm", &["-u", "500", "-n", "20"]))?;
            machine.wait_for_connection()?;
            let sender = machine.run(ProgramRun {
                host: 2,
                ..with_arguments("NPpvm", &["-h", "h1", "-u", "500", "-n", "20"])
            })?;
            Ok(machine.text(&receiver.finish(TIMEOUT)?) + &sender)
        }),
        case("slsh", Comparison::Lines, |machine| {
            let exported = |command: &mut Command| {
                command.env("HOST", "somewhere").env("PVM_EXPORT", "HOST");
            };
            let said = machine
                .start_with(with_arguments("slsh", &["hello_master"]), exported)?
                .finish(TIMEOUT)?;
            Ok(machine.text(&said))
        }),
        // The program does not wait for output that arrives after its slave's message about the
        // end.
        case_without_lines(
            |line| line == "hi",
            with_arguments("slsh", &["master", "echo hi", "2"]),
            Comparison::Sorted,
        ),
        plain_case(without_arguments("pvmgetarch"), Comparison::Lines),
        plain_case(without_arguments("tracer"), Comparison::Lines),
        case_with_input("tracer", "trace\nhelp\nquit\n", Comparison::Lines),
        plain_case(
            with_arguments("trcsort", &["no-such-file"]),
            Comparison::Lines,
        ),
    ]);
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn debians_resource_manager() {
    check_on_two_systems(&[case("srm.pvm", Comparison::Lines, |machine| {
        // PVM's daemons accept only a resource manager that was registered before they started.
        machine.console("delete h2 h3\n", "deleted")?;
        machine.wait_until_console_shows("conf\n", "1 host,")?;
        let mut manager = machine.start(without_arguments("srm.pvm"))?;
        machine.wait_until_printed(&manager, "registered as Resource Manager")?;
        let served = machine.run(without_arguments("hello.pvm"))?
            + &machine.console("conf\nspawn -1 nosuchprogram\n", "No such")?;
        let alive = manager.poll()?.is_none();
        manager.end_inside()?;
        Ok(format!(
            "{served}the manager is {}",
            if alive { "alive" } else { "gone" }
        ))
    })]);
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn debians_console() {
    check_on_two_systems(&[
        console_case(
            "a job",
            "spawn -3 -> /bin/hostname\n",
            "finished",
            Comparison::Sorted,
        ),
        console_case("conf", "conf\n", "h3", Comparison::Lines),
        console_case(
            "a session",
            "version\nid\nconf\nmstat h2 nohost\npstat t99999\nadd nohost\nalias\n\
             spawn -2 -h2 nosuchprogram\nspawn\nfoo\ngetopt\nsetopt route 1\nsetopt foo 1\nputs\nnames\n\
             export PATH\nexport\nunexport PATH\necho a  b\nhelp conf\nps -a\njobs\ntrace\ndelete h3\necho done\n",
            "done\n",
            Comparison::Lines,
        ),
    ]);
}
