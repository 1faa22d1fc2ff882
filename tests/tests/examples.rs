//! Debian's unmodified programs print the same output on three hosts of Sempa as on PVM 3.4.6. So
//! do PVM's examples that are built from their sources with our headers and libraries.

use anyhow::Result;
use sempa_tests::eventually;
use sempa_tests::matrix::{Compare, Heard, Machine, Shell, System, alone, normal, on, with};
use sempa_tests::needs;
use sempa_tests::run::{Running, must, run};
use sempa_tests::screen::{self, BLACK, Picture, Screen, WHITE};
use sempa_tests::timetable::{self, School};
use std::fs;
use std::ops::Range;
use std::process::{Command, Stdio};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(40);

/// A test case, as (name, form of the comparison, function that runs it).
type Case<'a> = (
    &'a str,
    Compare,
    Box<dyn Fn(&Machine) -> Result<String> + Sync + 'a>,
);

/// Runs all cases on PVM and on Sempa, and compares the outputs. The cases run one after another on
/// the same virtual machine.
fn the_same_on_both(cases: &[Case]) {
    let [real, ours] = on([System::Pvm, System::Ours], |machine| heard(machine, cases));
    let wrong = differences(cases, &real, "ours", &ours);
    assert!(wrong.is_empty(), "{wrong}");
}

/// As [`the_same_on_both`]; also runs the programs that are built from their sources.
fn the_same_on_both_and_built(cases: &[Case]) {
    let systems = [System::Pvm, System::Ours, System::Built];
    let [real, ours, built] = on(systems, |machine| heard(machine, cases));
    let wrong =
        differences(cases, &real, "ours", &ours) + &differences(cases, &real, "built", &built);
    assert!(wrong.is_empty(), "{wrong}");
}

fn heard(machine: &Machine, cases: &[Case]) -> Result<Vec<Heard>> {
    Ok(cases
        .iter()
        .map(|(_, _, run)| run(machine).map_err(|error| format!("{error:#}")))
        .collect())
}

/// Returns a description of the differences between the outputs of PVM and of another system; an
/// empty text if there are none.
fn differences(cases: &[Case], real: &[Heard], name_of_other: &str, other: &[Heard]) -> String {
    let mut wrong = String::new();
    for (((name, how, _), real), other) in cases.iter().zip(real).zip(other) {
        if std::env::var_os("SEMPA_SHOW").is_some() {
            eprintln!("=== {name}\n{real:?}\n--- {name_of_other}\n{other:?}");
        }
        let compared = |heard: &Heard| {
            heard
                .as_ref()
                .map(|text| normal(text, *how))
                .map_err(Clone::clone)
        };
        match (compared(real), compared(other)) {
            (Ok(real), Ok(other)) if real == other => {}
            (Ok(real), Ok(other)) => {
                let (only_real, only_other) = (only_in(&real, &other), only_in(&other, &real));
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
                let shown =
                    |heard: Heard| heard.map_or_else(|error| error, |_| "it went well".to_string());
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
fn only_in(text: &str, other: &str) -> String {
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
    how: Compare,
    run: impl Fn(&Machine) -> Result<String> + Sync + 'a,
) -> Case<'a> {
    (name, how, Box::new(run))
}

fn plain<'a>(shell: Shell<'a>, how: Compare) -> Case<'a> {
    case(shell.program, how, move |machine| machine.run(shell))
}

/// Returns a case whose output is compared without the lines for which `left_out` returns true.
fn but_for<'a>(left_out: fn(&str) -> bool, shell: Shell<'a>, how: Compare) -> Case<'a> {
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
fn where_it_was_compiled(line: &str) -> bool {
    ["At line", "at ", "#"]
        .iter()
        .any(|start| line.trim().starts_with(start))
}

/// True for the line in which `frsg` prints a sum. The variable of the sum is not initialised, so
/// the line is wrong on PVM, too, unless the stack happens to be zero. Another line of `frsg` shows
/// that its group works.
fn sum_of_frsg(line: &str) -> bool {
    line.contains("Sum of Squares of")
}

fn typed<'a>(program: &'a str, input: &'a str, how: Compare) -> Case<'a> {
    plain(
        Shell {
            input,
            ..alone(program)
        },
        how,
    )
}

/// Returns a case that runs two copies of a program, on two hosts at the same time. Its output is
/// that of both.
fn twice<'a>(program: &'a str, how: Compare) -> Case<'a> {
    case(program, how, move |machine| {
        let first = machine.start(alone(program))?;
        let second = machine.run(Shell {
            host: 2,
            ..alone(program)
        })?;
        Ok(machine.text(&first.finish(TIMEOUT)?) + &second)
    })
}

/// Returns a case that runs a server and, when `name` is in the mailbox, the programs `others`. Its
/// output is that of all programs, the server's last.
fn served<'a>(server: Shell<'a>, name: &'a str, others: &'a [Shell<'a>], how: Compare) -> Case<'a> {
    case(server.program, how, move |machine| {
        let running = machine.start(server)?;
        machine.in_mailbox(name)?;
        let mut all = String::new();
        for other in others {
            all += &machine.run(*other)?;
        }
        Ok(all + &machine.text(&running.finish(TIMEOUT)?))
    })
}

/// Returns a case that runs a worker without a master. Its output is what the worker prints until
/// `last_words`, which appear some time after it has connected.
fn waiting<'a>(program: &'a str, last_words: &'a str) -> Case<'a> {
    case(program, Compare::Lines, move |machine| {
        let mut slave = machine.start(alone(program))?;
        machine.connected()?;
        let out = eventually(TIMEOUT, || {
            let text = |slave: &Running| Ok(slave.out_so_far()? + &slave.err_so_far()?);
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

fn at_console<'a>(name: &'a str, commands: &'a str, until: &'a str, how: Compare) -> Case<'a> {
    case(name, how, move |machine| machine.console(commands, until))
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn examples_with_workers() {
    the_same_on_both_and_built(&[
        plain(alone("hello.pvm"), Compare::Lines),
        plain(alone("hello_other"), Compare::Lines),
        plain(alone("master1"), Compare::Sorted),
        plain(alone("fmaster1"), Compare::Sorted),
        plain(alone("spmd"), Compare::Lines),
        plain(alone("fspmd"), Compare::Lines),
        at_console(
            "spmd from the console",
            "spawn -4 -> spmd\n",
            "finished",
            Compare::Sorted,
        ),
        at_console(
            "fspmd from the console",
            "spawn -4 -> fspmd\n",
            "finished",
            Compare::Sorted,
        ),
        plain(alone("hitc"), Compare::Kinds),
        plain(alone("timing"), Compare::Kinds),
        waiting("slave1", ""),
        waiting("timing_slave", "Bad parameter"),
    ]);
}

/// Arguments of xdotool that press xep's button for the end.
const QUIT: &str = "mousemove 19 46 click 1";
/// Arguments of xdotool that drag the mouse over xep's picture, which selects a part of it.
const ENLARGE: &str =
    "mousemove 65 128 mousedown 1 mousemove 100 150 mousemove 145 208 mouseup 1 click 2";
/// Lines of xep's picture on the screen, without its frame.
const LINES: Range<usize> = 70..268;
/// A column of the picture that has no white pixels when the whole set is drawn. White pixels are
/// outside of the set, or not yet drawn by a worker.
const IN_THE_WHOLE: usize = 106;
/// A column of the picture that has no white pixels when the selected part is drawn.
const IN_THE_PART: usize = 8;
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
fn drawn(screen: &Screen, column: usize) -> Result<Picture> {
    eventually(TIMEOUT, || {
        let picture = screen.picture().map_err(|error| format!("{error:#}"))?;
        let labelled = LABELS.iter().filter(|(lines, columns)| {
            let label = picture.part(lines.clone(), columns.clone());
            [BLACK, WHITE].iter().all(|colour| label.contains(colour))
        });
        let (labelled, down) = (labelled.count(), picture.part(LINES, column..column + 1));
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
    needs::require(screen::lacks());
    the_same_on_both(&[
        plain(alone("xep"), Compare::Lines),
        waiting("mtile", ""),
        case("xep with a display", Compare::Lines, |machine| {
            let screen = Screen::start(machine.bed().host(1))?;
            let running = machine.start_with(alone("xep"), |command| {
                command.env("DISPLAY", screen.name());
            })?;
            let whole = drawn(&screen, IN_THE_WHOLE)?;
            screen.mouse(ENLARGE)?;
            let part = drawn(&screen, IN_THE_PART)?;
            let workers = machine
                .console("ps -a\n", "mtile")?
                .matches("mtile")
                .count();
            screen.mouse(QUIT)?;
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
    lessons: 4,
    at_once: 4,
};

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn tablix_finds_valid_timetables() {
    needs::require_program("/usr/bin/tablix2", "tablix2");
    the_same_on_both(&[case("tablix2", Compare::Kinds, |machine| {
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
        let said = machine.run(with("tablix2", &words))?;
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
            must(output, TIMEOUT)?;
            // The check fails if a hard constraint is violated.
            let solution = timetable::check(&fs::read_to_string(&table)?)?;
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
    the_same_on_both_and_built(&[
        typed("gexample", "10 4\n", Compare::Sorted),
        at_console(
            "gexample from the console",
            "spawn -3 -> gexample\n",
            "finished",
            Compare::Kinds,
        ),
        // The last digits of its results depend on the order of multiplications.
        plain(alone("fgexample"), Compare::Kinds),
        but_for(
            sum_of_frsg,
            Shell {
                input: "8\n4\n",
                ..alone("frsg")
            },
            Compare::Sorted,
        ),
        but_for(
            where_it_was_compiled,
            Shell {
                input: "8 4\n",
                ..alone("frsg")
            },
            Compare::Sorted,
        ),
        but_for(where_it_was_compiled, alone("frsg"), Compare::Sorted),
        typed("trsg", "8 4\n", Compare::Sorted),
        // A member may request the numbers of other members before all have joined.
        but_for(
            |line| line.contains("doesn't match up"),
            with("ge", &["4"]),
            Compare::Kinds,
        ),
        plain(alone("ge"), Compare::Lines),
        plain(with("gexamp", &["4"]), Compare::Kinds),
        // The line appears only if the children are slower than their parent.
        but_for(
            |line| line.contains("waiting on kids"),
            with("gs.pvm", &["4"]),
            Compare::Kinds,
        ),
        plain(alone("gs.pvm"), Compare::Lines),
        plain(with("joinleave", &["200"]), Compare::Lines),
        plain(with("thb", &["3"]), Compare::Kinds),
        // The program reads one name beyond the end of its table.
        but_for(
            |line| matches!(line.trim(), "joined" | "joined group32"),
            alone("tjf"),
            Compare::Lines,
        ),
        plain(alone("tjl"), Compare::Lines),
        plain(alone("tst"), Compare::Lines),
        plain(alone("pvm_gstat"), Compare::Lines),
        case("pvm_gstat of a group", Compare::Lines, |machine| {
            let first = machine.start(alone("dbwtest"))?;
            let shown = eventually(TIMEOUT, || match machine.run(alone("pvm_gstat")) {
                Ok(out) if out.contains("size: 1,") => Ok(out),
                other => Err(format!("no group with one member: {other:?}")),
            })?;
            machine.run(alone("dbwtest"))?;
            first.finish(TIMEOUT)?;
            Ok(shown)
        }),
        // PVM's server prints the dump to the log, our library to standard output.
        but_for(
            |line| line.contains("DUMP"),
            alone("pvmgroups"),
            Compare::Lines,
        ),
    ]);
}

/// Path of Debian's group library, which programs on Sempa do not use by default.
const GROUP_LIBRARY: &str = "/usr/lib/x86_64-linux-gnu/libgpvm3.so.3";

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn calls_of_pvms_own_group_library_are_traced() {
    the_same_on_both(&[case("tst traced", Compare::Kinds, |machine| {
        let host = machine.bed().host(1);
        let file = machine.bed().home().join("records");
        let place = file.display().to_string();
        let mut tracer = machine.command(host, "/usr/bin/tracer");
        tracer.args(["-T", &place]);
        let mut tracer = Running::start(tracer, Stdio::piped())?;
        // The tracer ends at the end of its input, so the input stays open.
        let input = tracer.take_stdin();
        machine.connected()?;
        let mut task = machine.command(host, "/usr/bin/env");
        task.arg(format!("LD_PRELOAD={GROUP_LIBRARY}"))
            .arg("/usr/bin/tst");
        let done = run(task, TIMEOUT)?;
        let records = eventually(TIMEOUT, || match fs::read_to_string(&file) {
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
    the_same_on_both_and_built(&[
        twice("dbwtest", Compare::Kinds),
        twice("ibwtest", Compare::Kinds),
        twice("rbwtest", Compare::Kinds),
        twice("pbwtest", Compare::Kinds),
    ]);
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn examples_of_mailbox_and_contexts() {
    the_same_on_both_and_built(&[
        plain(with("lmbi", &["1", "d", "e"]), Compare::Lines),
        plain(with("lmbi", &["2", "p", "e"]), Compare::Lines),
        plain(with("lmbi", &["3", "pm", "e"]), Compare::Lines),
        plain(with("lmbi", &["1", "o", "e"]), Compare::Lines),
        plain(alone("lmbi"), Compare::Lines),
        plain(alone("gmbi"), Compare::Lines),
        plain(with("gmbi", &["entry"]), Compare::Lines),
        plain(with("task1", &["svc", "0", "d"]), Compare::Lines),
        served(
            with("task0", &["svc", "d"]),
            "svc",
            &[
                Shell {
                    host: 2,
                    ..with("task1", &["svc", "0", "d"])
                },
                with("rme", &["svc", "0"]),
                with("task1", &["svc", "0", "d"]),
                with("task_end", &["svc", "0"]),
            ],
            Compare::Lines,
        ),
        plain(with("rme", &["svc", "0"]), Compare::Lines),
        plain(alone("task0"), Compare::Lines),
        plain(alone("task1"), Compare::Lines),
        plain(alone("task_end"), Compare::Lines),
        plain(with("inherita", &["inherit1"]), Compare::Sorted),
        plain(with("inherita", &["inherit3"]), Compare::Sorted),
        plain(alone("inheritb"), Compare::Sorted),
        plain(alone("inherit1"), Compare::Lines),
        plain(alone("inherit2"), Compare::Lines),
        plain(alone("inherit3"), Compare::Lines),
    ]);
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn examples_of_message_handlers() {
    the_same_on_both_and_built(&[
        plain(alone("mhf_tickle"), Compare::Lines),
        served(
            alone("mhf_server"),
            "mhf_server",
            &[Shell {
                input: "0\n1\n1\n1\n6\n0\n4\n1\n4\n6\n2\n9\n3\n9\n",
                ..alone("mhf_tickle")
            }],
            Compare::Lines,
        ),
    ]);
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn programs_of_other_packages() {
    needs::require_program("/usr/bin/NPpvm", "netpipe-pvm");
    needs::require_program("/usr/bin/slsh", "slang-pvm and slsh");
    the_same_on_both(&[
        case("NPpvm", Compare::Kinds, |machine| {
            let receiver = machine.start(with("NPpvm", &["-u", "500", "-n", "20"]))?;
            machine.connected()?;
            let sender = machine.run(Shell {
                host: 2,
                ..with("NPpvm", &["-h", "h1", "-u", "500", "-n", "20"])
            })?;
            Ok(machine.text(&receiver.finish(TIMEOUT)?) + &sender)
        }),
        case("slsh", Compare::Lines, |machine| {
            let exported = |command: &mut Command| {
                command.env("HOST", "somewhere").env("PVM_EXPORT", "HOST");
            };
            let said = machine
                .start_with(with("slsh", &["hello_master"]), exported)?
                .finish(TIMEOUT)?;
            Ok(machine.text(&said))
        }),
        // The program does not wait for output that arrives after its slave's message about the
        // end.
        but_for(
            |line| line == "hi",
            with("slsh", &["master", "echo hi", "2"]),
            Compare::Sorted,
        ),
        plain(alone("pvmgetarch"), Compare::Lines),
        plain(alone("tracer"), Compare::Lines),
        typed("tracer", "trace\nhelp\nquit\n", Compare::Lines),
        plain(with("trcsort", &["no-such-file"]), Compare::Lines),
    ]);
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn debians_resource_manager() {
    the_same_on_both(&[case("srm.pvm", Compare::Lines, |machine| {
        // PVM's daemons accept only a resource manager that was registered before they started.
        machine.console("delete h2 h3\n", "deleted")?;
        machine.shown_at_console("conf\n", "1 host,")?;
        let mut manager = machine.start(alone("srm.pvm"))?;
        machine.printed(&manager, "registered as Resource Manager")?;
        let served = machine.run(alone("hello.pvm"))?
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
    the_same_on_both(&[
        at_console(
            "a job",
            "spawn -3 -> /bin/hostname\n",
            "finished",
            Compare::Sorted,
        ),
        at_console("conf", "conf\n", "h3", Compare::Lines),
        at_console(
            "a session",
            "version\nid\nconf\nmstat h2 nohost\npstat t99999\nadd nohost\nalias\n\
             spawn -2 -h2 nosuchprogram\nspawn\nfoo\ngetopt\nsetopt route 1\nsetopt foo 1\nputs\nnames\n\
             export PATH\nexport\nunexport PATH\necho a  b\nhelp conf\nps -a\njobs\ntrace\ndelete h3\necho done\n",
            "done\n",
            Compare::Lines,
        ),
    ]);
}
