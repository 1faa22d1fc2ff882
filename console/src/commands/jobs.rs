//! `jobs`: lists the jobs whose output or records this console collects.

use crate::command::{CommandSpec, ParsedCommand, VmCommand};
use crate::outcome::Outcome;
use crate::output::tables;
use crate::parse_error::ParseError;
use crate::session::Session;
use libpvm::Error;
use sempa_proto::Tid;
use serde_json::json;

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "jobs",
    summary: "List jobs whose output is collected here",
    detail: "Syntax:  jobs [ -l ]\nOptions:  -l   with a line for each task\n",
    parse: |args| parse(args).map(ParsedCommand::on_vm),
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct JobsCommand {
    /// Adds a line for each task.
    long: bool,
}

fn parse(args: &[String]) -> Result<JobsCommand, ParseError> {
    match args {
        [] => Ok(JobsCommand { long: false }),
        [flag] if flag == "-l" => Ok(JobsCommand { long: true }),
        [flag] if flag.starts_with('-') => Err(ParseError::UnknownFlag(flag[1..].to_string())),
        _ => Err(ParseError::WrongArgs("jobs")),
    }
}

impl VmCommand for JobsCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let long = self.long;
        let mut text = if long {
            tables::ps_header(false)
        } else {
            String::new()
        };
        let (table, tasks) = if long {
            (session.vm.hosts()?, session.vm.tasks(Tid::NONE)?)
        } else {
            Default::default()
        };
        let mut values = Vec::new();
        for (number, tids) in session.jobs.running() {
            let traced = session
                .job_outputs
                .get(&number)
                .is_some_and(|job| job.is_traced());
            let mark = if traced { 'T' } else { ' ' };
            let tid_texts: Vec<String> = tids.iter().map(Tid::to_string).collect();
            if long {
                text.push_str(&format!("{mark}{number}:\n"));
                let rows = tasks.iter().filter(|task| tids.contains(&task.tid));
                rows.for_each(|task| {
                    text.push_str(&tables::ps_row(&table, task, session.vm.tid(), false))
                });
            } else {
                let list: String = tids.iter().map(|tid| format!(" {tid}")).collect();
                text.push_str(&format!("{mark}{number}:{list}\n"));
            }
            values.push(json!({ "number": number, "traced": traced, "tids": tid_texts }));
        }
        Ok(Outcome::with_values(text, json!({ "jobs": values }), false))
    }
}
