//! `drain` and `undrain`: a host is emptied, for repairs or before it leaves, and takes tasks again. The resource manager has its
//! tasks leave; what is shown here is what it says when it is asked again and again.

use crate::machine::{Machine, misfit};
use crate::parse::ParseError;
use crate::session::Outcome;
use crate::words::{option, span};
use libpvm::Error;
use sempa_proto::checkpoint::{CutFailure, SetReport};
use sempa_proto::rm::{Answer, Question};
use sempa_proto::task::{Reply, Request};
use sempa_proto::{Micros, Tid};
use serde_json::json;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Pause between two questions how far it is.
const PAUSE: Duration = Duration::from_millis(100);
/// Who names no deadline waits as long as tasks leave, and so long for the first and for each further one.
const PATIENCE: Duration = Duration::from_secs(10);
/// A deadline further away is a slip of the pen.
const WITHIN_MAX: Duration = Duration::from_secs(24 * 3600);

/// What `drain` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Drain {
    /// The host's name.
    pub(crate) host: String,
    /// It is to be empty within this time.
    pub(crate) within: Option<Duration>,
    /// Jobs with tasks that are there then are checkpointed and ended.
    pub(crate) checkpoint: bool,
}

/// Reads the words behind the command.
pub(crate) fn parse(args: &[String]) -> Result<Drain, ParseError> {
    let (mut host, mut within, mut checkpoint) = (None, None, false);
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        match option("drain", "--deadline", arg, &mut rest)? {
            Some(value) => {
                let wanted = "a time such as 30s or 5m";
                let not = || ParseError::NotA { command: "drain", word: value.into(), wanted };
                within = Some(span(value).filter(|span| *span <= WITHIN_MAX).ok_or_else(not)?);
            }
            None if arg == "--checkpoint" => checkpoint = true,
            None if arg.starts_with('-') => {
                return Err(ParseError::UnknownFlag(arg.trim_start_matches('-').to_string()));
            }
            None if host.is_none() => host = Some(arg.clone()),
            None => return Err(ParseError::WrongArgs("drain")),
        }
    }
    Ok(Drain { host: host.ok_or(ParseError::WrongArgs("drain"))?, within, checkpoint })
}

fn not_known(command: &str, host: &str) -> Outcome {
    Outcome::complaint(format!("{command}: the resource manager knows no host {host}; 'conf' lists them"))
}

/// What is left on a host, and why.
type Left = BTreeMap<Tid, Option<String>>;

fn left(answer: Answer) -> Result<Option<(bool, Left, u32)>, Error> {
    match answer {
        Answer::Drain { drained, tasks, stay } => Ok(Some((drained, tasks.into_iter().collect(), stay))),
        Answer::Unknown => Ok(None),
        _ => Err(misfit()),
    }
}

/// Has a host emptied and waits, until it is or its time is over; `show` gets each line as it comes.
pub(crate) fn drain(machine: &impl Machine, what: &Drain, show: &mut dyn FnMut(&str)) -> Result<Outcome, Error> {
    let Drain { host, within, checkpoint } = what;
    let micros = within.map(|within| Micros(within.as_micros() as u64));
    let Some((_, mut tasks, stay)) = left(machine.ask_rm(&Question::Drain { host: host.clone(), within: micros })?)?
    else {
        return Ok(not_known("drain", host));
    };
    let begun = Instant::now();
    let mut until = begun + within.unwrap_or(PATIENCE);
    let (mut gone, all) = (Vec::new(), tasks.len());
    show(&format!("{host} takes no tasks; {all} {} to leave\n", if all == 1 { "is" } else { "are" }));
    while !tasks.is_empty() && Instant::now() < until {
        std::thread::sleep(PAUSE);
        let Some((drained, now, _)) = left(machine.ask_rm(&Question::Draining { host: host.clone() })?)? else { break };
        for tid in tasks.keys().filter(|tid| !now.contains_key(tid)) {
            gone.push(*tid);
            show(&format!("{tid} has left ({} of {all})\n", gone.len()));
            until = if within.is_none() { Instant::now() + PATIENCE } else { until };
        }
        tasks = now;
        if !drained {
            show(&format!("{host} takes tasks again: somebody has called it off\n"));
            break;
        }
    }
    let mut sets = Vec::new();
    if *checkpoint && !tasks.is_empty() {
        for (job, result) in write_down(machine, &tasks)? {
            match result {
                Ok(report) => {
                    show(&format!("job {job} has ended; 'restart {}' starts it again\n", report.set));
                    tasks.retain(|tid, _| !report.tasks.contains(tid));
                    gone.extend(report.tasks);
                    sets.push(report.set);
                }
                Err(why) => show(&format!("no checkpoint of job {job}: {why}; it goes on\n")),
            }
        }
    }
    let mut text = String::new();
    for (tid, why) in &tasks {
        text.push_str(&format!("{tid} is still there: {}\n", why.as_deref().unwrap_or("it is on its way")));
    }
    if tasks.is_empty() {
        text.push_str(&format!("{host} is empty after {:.1} s\n", begun.elapsed().as_secs_f64()));
    }
    if stay > 0 {
        text.push_str(&format!("{stay} that belong to the host, or were started there by hand, stay until they end\n"));
    }
    let names = |list: &mut dyn Iterator<Item = &Tid>| list.map(Tid::to_string).collect::<Vec<_>>();
    let still: Vec<_> = tasks.iter().map(|(tid, why)| json!({ "tid": tid.to_string(), "why": why })).collect();
    let value = json!({ "host": host, "left": names(&mut gone.iter()), "still": still, "stay": stay, "sets": sets });
    show(&text);
    Ok(Outcome::done(String::new(), value, !tasks.is_empty()))
}

/// A job, and its checkpoint or why there is none.
type Written = (Tid, Result<SetReport, CutFailure>);

/// Has the jobs of these tasks checkpointed and ended, one after the other.
fn write_down(machine: &impl Machine, tasks: &Left) -> Result<Vec<Written>, Error> {
    let all: BTreeMap<Tid, Tid> = machine.tasks(Tid::NONE)?.into_iter().map(|task| (task.tid, task.parent)).collect();
    let spawned = |tid: &Tid| tasks.contains_key(tid) || all.get(tid).is_some_and(|parent| parent.is_task());
    let mut jobs: Vec<Tid> = tasks.keys().map(|tid| top(*tid, &all, spawned)).collect();
    jobs.sort_unstable();
    jobs.dedup();
    // Whoever was started by hand and is alive would see its children end. It cannot be written itself.
    jobs.retain(|job| all.get(job).is_none_or(|by| *by == machine.tid() || !all.contains_key(by)));
    let mut results = Vec::new();
    for job in jobs {
        match machine.ask(Request::Checkpoint { job, pace: None, end: true, wait: true })? {
            Reply::Checkpointed(result) => results.push((job, result)),
            _ => return Err(misfit()),
        }
    }
    Ok(results)
}

/// The first task of the job that a task belongs to: the topmost of its ancestors that somebody has spawned.
fn top(tid: Tid, parents: &BTreeMap<Tid, Tid>, spawned: impl Fn(&Tid) -> bool) -> Tid {
    let mut top = tid;
    // No longer than there are tasks, whatever a daemon says.
    for _ in 0..parents.len() {
        match parents.get(&top).filter(|parent| parents.contains_key(parent) && spawned(parent)) {
            Some(parent) => top = *parent,
            None => break,
        }
    }
    top
}

/// Lets a host take tasks again.
pub(crate) fn undrain(machine: &impl Machine, host: &str) -> Result<Outcome, Error> {
    let Some((drained, ..)) = left(machine.ask_rm(&Question::Undrain { host: host.to_string() })?)? else {
        return Ok(not_known("undrain", host));
    };
    Ok(Outcome::done(format!("{host} takes tasks\n"), json!({ "host": host, "drained": drained }), false))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Result<Drain, ParseError> {
        parse(&line.split(' ').filter(|word| !word.is_empty()).map(String::from).collect::<Vec<_>>())
    }

    #[test]
    fn a_host_and_a_deadline_are_read_in_any_order() {
        let seconds = |n| Some(Duration::from_secs(n));
        assert_eq!(words("h2"), Ok(Drain { host: "h2".into(), within: None, checkpoint: false }));
        assert_eq!(words("h2 --deadline 30s"), Ok(Drain { host: "h2".into(), within: seconds(30), checkpoint: false }));
        assert_eq!(words("--deadline=5m h2"), Ok(Drain { host: "h2".into(), within: seconds(300), checkpoint: false }));
        assert!(words("h2 --checkpoint --deadline 30s").is_ok_and(|drain| drain.checkpoint));
        for line in ["", "h2 h3", "--deadline 3s", "h2 --deadline"] {
            assert_eq!(words(line), Err(ParseError::WrongArgs("drain")), "{line}");
        }
        assert_eq!(words("-x h2"), Err(ParseError::UnknownFlag("x".into())));
        for time in ["0s", "x", "3", "2d"] {
            let error = words(&format!("h2 --deadline {time}")).expect_err(time).to_string();
            assert_eq!(error, format!("drain: {time} is not a time such as 30s or 5m"));
        }
    }

    #[test]
    fn the_job_of_a_task_begins_at_the_topmost_ancestor_that_somebody_has_spawned() {
        let tid = |n: i32| Tid::from_raw(0x40000 + n);
        // A console, what it has spawned, and a grandchild; a task whose parent has ended; two that a liar made parents of each other.
        let parents = BTreeMap::from([
            (tid(1), Tid::NONE),
            (tid(2), tid(1)),
            (tid(3), tid(2)),
            (tid(4), tid(9)),
            (tid(5), tid(6)),
            (tid(6), tid(5)),
        ]);
        let job = |of: i32| top(tid(of), &parents, |tid| parents.get(tid).is_some_and(|parent| parent.is_task()));
        assert_eq!([job(3), job(2), job(4)], [tid(2), tid(2), tid(4)]);
        assert!([tid(5), tid(6)].contains(&job(5)));
    }
}
