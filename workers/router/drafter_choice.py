class DrafterChoice:
    def choose(self, c, names):
        return names[0]

    def observe(self, *a):
        pass
