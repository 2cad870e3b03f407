"""When to save, decided while a job runs, and what to do when its end is announced (floor 0: imports nothing).

`controller` is what users hold; `meter` measures steps, `flights` saves; `council` lets ranks decide as one; `rescue`
decides what a notice leaves time for, and `lastsave` does it; `notice` hears signals, for whoever asks for that.
"""
