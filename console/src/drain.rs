//! `drain` and `undrain`: a host is emptied, for repairs or before it leaves, and takes tasks again. The resource manager has its
//! tasks leave; what is shown here is what it says when it is asked again and again.

use crate::machine::{Machine, misfit};
use crate::parse::ParseError;
use crate::session::Outcome;
use crate::words::span;
use libpvm::Error;
use sempa_proto::rm::{Answer, Question};
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
}

/// Reads the words behind the command.
pub(crate) fn parse(args: &[String]) -> Result<Drain, ParseError> {
    let (mut host, mut within) = (None, None);
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        let value = match arg.as_str() {
            "--deadline" => Some(rest.next().ok_or(ParseError::WrongArgs("drain"))?.as_str()),
            other => other.strip_prefix("--deadline="),
        };
        match value {
            Some(value) => {
                let wanted = "a time such as 30s or 5m";
                let not = || ParseError::NotA { command: "drain", word: value.into(), wanted };
                within = Some(span(value).filter(|span| *span <= WITHIN_MAX).ok_or_else(not)?);
            }
            None if arg.starts_with('-') => {
                return Err(ParseError::UnknownFlag(arg.trim_start_matches('-').to_string()));
            }
            None if host.is_none() => host = Some(arg.clone()),
            None => return Err(ParseError::WrongArgs("drain")),
        }
    }
    Ok(Drain { host: host.ok_or(ParseError::WrongArgs("drain"))?, within })
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
    let Drain { host, within } = what;
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
    let value = json!({ "host": host, "left": names(&mut gone.iter()), "still": still, "stay": stay });
    show(&text);
    Ok(Outcome::done(String::new(), value, !tasks.is_empty()))
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
        assert_eq!(words("h2"), Ok(Drain { host: "h2".into(), within: None }));
        assert_eq!(words("h2 --deadline 30s"), Ok(Drain { host: "h2".into(), within: seconds(30) }));
        assert_eq!(words("--deadline=5m h2"), Ok(Drain { host: "h2".into(), within: seconds(300) }));
        for line in ["", "h2 h3", "--deadline 3s", "h2 --deadline"] {
            assert_eq!(words(line), Err(ParseError::WrongArgs("drain")), "{line}");
        }
        assert_eq!(words("-x h2"), Err(ParseError::UnknownFlag("x".into())));
        for time in ["0s", "x", "3", "2d"] {
            let error = words(&format!("h2 --deadline {time}")).expect_err(time).to_string();
            assert_eq!(error, format!("drain: {time} is not a time such as 30s or 5m"));
        }
    }
}
