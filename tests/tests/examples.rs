//! Debian's programs, not compiled again, print on three hosts of ours what they print on PVM 3.4.6.

use anyhow::Result;
use sempa_tests::matrix::{Compare, Heard, Machine, Shell, alone, normal, on_both, with};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(40);

/// One case: its name, how its output is compared, how it is run.
type Case<'a> = (&'a str, Compare, Box<dyn Fn(&Machine) -> Result<String> + Sync + 'a>);

/// Runs all cases on both systems, one after the other on the same virtual machine, and compares what they print.
fn the_same_on_both(cases: &[Case]) {
    let all = |machine: &Machine| -> Result<Vec<Heard>> {
        Ok(cases.iter().map(|(_, _, run)| run(machine).map_err(|error| format!("{error:#}"))).collect())
    };
    let Some([real, ours]) = on_both(all) else { return };
    let mut wrong = String::new();
    for (((name, how, _), real), ours) in cases.iter().zip(&real).zip(&ours) {
        if std::env::var_os("SEMPA_SHOW").is_some() {
            eprintln!("=== {name}\n{real:?}\n--- ours\n{ours:?}");
        }
        let compared = |heard: &Heard| heard.as_ref().map(|text| normal(text, *how)).map_err(Clone::clone);
        match (compared(real), compared(ours)) {
            (Ok(real), Ok(ours)) if real == ours => {}
            (Ok(real), Ok(ours)) => {
                let (only_real, only_ours) = (only_in(&real, &ours), only_in(&ours, &real));
                wrong += &format!("=== {name}\n--- only PVM's lines\n{only_real}\n--- only our lines\n{only_ours}\n");
                if only_real.is_empty() && only_ours.is_empty() {
                    wrong += &format!("the order differs:\n--- PVM\n{real}\n--- ours\n{ours}\n");
                }
            }
            (real, ours) => {
                let shown = |heard: Heard| heard.map_or_else(|error| error, |_| "it went well".to_string());
                wrong += &format!("=== {name} failed\n--- PVM: {}\n--- ours: {}\n", shown(real), shown(ours));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// The lines of one text that another does not have as often.
fn only_in(text: &str, other: &str) -> String {
    let mut rest: Vec<&str> = other.lines().collect();
    let missing = text.lines().filter(|line| match rest.iter().position(|one| one == line) {
        Some(at) => {
            rest.swap_remove(at);
            false
        }
        None => true,
    });
    missing.collect::<Vec<_>>().join("\n")
}

fn case<'a>(name: &'a str, how: Compare, run: impl Fn(&Machine) -> Result<String> + Sync + 'a) -> Case<'a> {
    (name, how, Box::new(run))
}

fn plain<'a>(shell: Shell<'a>, how: Compare) -> Case<'a> {
    case(shell.program, how, move |machine| machine.run(shell))
}

/// Some lines are not compared.
fn but_for<'a>(left_out: fn(&str) -> bool, shell: Shell<'a>, how: Compare) -> Case<'a> {
    case(shell.program, how, move |machine| {
        let text = machine.run(shell)?;
        Ok(text.lines().filter(|line| !left_out(line)).map(|line| format!("{line}\n")).collect())
    })
}

fn typed<'a>(program: &'a str, input: &'a str, how: Compare) -> Case<'a> {
    plain(Shell { input, ..alone(program) }, how)
}

/// Two copies of a program in two shells; both outputs.
fn twice<'a>(program: &'a str, how: Compare) -> Case<'a> {
    case(program, how, move |machine| {
        let first = machine.start(alone(program))?;
        let second = machine.run(Shell { host: 2, ..alone(program) })?;
        Ok(machine.text(&first.finish(LONG)?) + &second)
    })
}

/// A program that serves, then others when the mailbox has its name; all outputs, the server's last.
fn served<'a>(server: Shell<'a>, name: &'a str, others: &'a [Shell<'a>], how: Compare) -> Case<'a> {
    case(server.program, how, move |machine| {
        let running = machine.start(server)?;
        machine.in_mailbox(name)?;
        let mut all = String::new();
        for other in others {
            all += &machine.run(*other)?;
        }
        Ok(all + &machine.text(&running.finish(LONG)?))
    })
}

fn at_console<'a>(name: &'a str, commands: &'a str, until: &'a str, how: Compare) -> Case<'a> {
    case(name, how, move |machine| machine.console(commands, until))
}

#[test]
fn examples_with_workers() {
    the_same_on_both(&[
        plain(alone("hello.pvm"), Compare::Lines),
        plain(alone("hello_other"), Compare::Lines),
        plain(alone("master1"), Compare::Sorted),
        plain(alone("fmaster1"), Compare::Sorted),
        plain(alone("spmd"), Compare::Lines),
        plain(alone("fspmd"), Compare::Lines),
        at_console("spmd from the console", "spawn -4 -> spmd\n", "finished", Compare::Sorted),
        at_console("fspmd from the console", "spawn -4 -> fspmd\n", "finished", Compare::Sorted),
        plain(alone("hitc"), Compare::Kinds),
        plain(alone("timing"), Compare::Kinds),
        plain(alone("xep"), Compare::Lines),
    ]);
}

#[test]
fn examples_with_groups() {
    the_same_on_both(&[
        typed("gexample", "10 4\n", Compare::Sorted),
        at_console("gexample from the console", "spawn -3 -> gexample\n", "finished", Compare::Kinds),
        // The last digits depend on the order of multiplications.
        plain(alone("fgexample"), Compare::Kinds),
        typed("frsg", "8 4\n", Compare::Sorted),
        plain(alone("frsg"), Compare::Sorted),
        typed("trsg", "8 4\n", Compare::Sorted),
        // Members may ask for each other's number before all have joined.
        but_for(|line| line.contains("doesn't match up"), with("ge", &["4"]), Compare::Kinds),
        plain(alone("ge"), Compare::Lines),
        plain(with("gexamp", &["4"]), Compare::Kinds),
        // Said only if the children are slower than their parent.
        but_for(|line| line.contains("waiting on kids"), with("gs.pvm", &["4"]), Compare::Kinds),
        plain(alone("gs.pvm"), Compare::Lines),
        plain(with("joinleave", &["200"]), Compare::Lines),
        plain(with("thb", &["3"]), Compare::Kinds),
        plain(alone("tjf"), Compare::Kinds),
        plain(alone("tjl"), Compare::Lines),
        plain(alone("tst"), Compare::Lines),
        plain(alone("pvm_gstat"), Compare::Lines),
        // PVM's server prints into the log, our library to standard output.
        but_for(|line| line.contains("DUMP"), alone("pvmgroups"), Compare::Lines),
    ]);
}

#[test]
fn examples_that_measure() {
    the_same_on_both(&[
        twice("dbwtest", Compare::Kinds),
        twice("ibwtest", Compare::Kinds),
        twice("rbwtest", Compare::Kinds),
        twice("pbwtest", Compare::Kinds),
    ]);
}

#[test]
fn examples_of_mailbox_and_contexts() {
    the_same_on_both(&[
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
                Shell { host: 2, ..with("task1", &["svc", "0", "d"]) },
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
fn examples_of_message_handlers() {
    the_same_on_both(&[
        plain(alone("mhf_tickle"), Compare::Lines),
        served(
            alone("mhf_server"),
            "mhf_server",
            &[Shell { input: "0\n1\n1\n1\n6\n0\n4\n1\n4\n6\n2\n9\n3\n9\n", ..alone("mhf_tickle") }],
            Compare::Lines,
        ),
    ]);
}

#[test]
fn programs_of_other_packages() {
    if !std::path::Path::new("/usr/bin/NPpvm").exists() || !std::path::Path::new("/usr/bin/slsh").exists() {
        eprintln!("skipped: netpipe-pvm, slang-pvm and slsh are not installed");
        return;
    }
    the_same_on_both(&[
        case("NPpvm", Compare::Kinds, |machine| {
            let receiver = machine.start(with("NPpvm", &["-u", "500", "-n", "20"]))?;
            machine.shown_at_console("ps -ax\n", "4/c -")?;
            let sender = machine.run(Shell { host: 2, ..with("NPpvm", &["-h", "h1", "-u", "500", "-n", "20"]) })?;
            Ok(machine.text(&receiver.finish(LONG)?) + &sender)
        }),
        plain(with("slsh", &["hello_master"]), Compare::Lines),
        // It does not wait for output that comes later than the message that its slave is done.
        but_for(|line| line == "hi", with("slsh", &["master", "echo hi", "2"]), Compare::Sorted),
        plain(alone("pvmgetarch"), Compare::Lines),
        plain(alone("tracer"), Compare::Lines),
        typed("tracer", "trace\nhelp\nquit\n", Compare::Lines),
        plain(with("trcsort", &["no-such-file"]), Compare::Lines),
    ]);
}

#[test]
fn debians_resource_manager() {
    the_same_on_both(&[case("srm.pvm", Compare::Lines, |machine| {
        // PVM's daemons take orders only from a manager that was there before them.
        machine.console("delete h2 h3\n", "deleted")?;
        machine.shown_at_console("conf\n", "1 host,")?;
        let mut manager = machine.start(alone("srm.pvm"))?;
        machine.printed(&manager, "registered as Resource Manager")?;
        let served =
            machine.run(alone("hello.pvm"))? + &machine.console("conf\nspawn -1 nosuchprogram\n", "No such")?;
        let alive = manager.poll()?.is_none();
        machine.end(manager)?;
        Ok(format!("{served}the manager is {}", if alive { "alive" } else { "gone" }))
    })]);
}

#[test]
fn debians_console() {
    the_same_on_both(&[
        at_console("a job", "spawn -3 -> /bin/hostname\n", "finished", Compare::Sorted),
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
