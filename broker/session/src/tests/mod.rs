mod rules;
mod simulation;
